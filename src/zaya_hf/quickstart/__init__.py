"""`zaya quickstart`: a tiny ZAYA model from text to a saved folder, offline, on one CPU core."""

"""`zaya quickstart`: five tiny models from text to a report and a folder to publish, offline, on two CPU cores."""

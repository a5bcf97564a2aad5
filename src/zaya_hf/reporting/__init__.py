"""Reports as single files: charts as inline SVG, and pages that load nothing from anywhere."""

"""What goes to the Hub beside the weights. Nothing in here opens a connection."""

"""Training data: documents as token ids, packed into rows, in an order that is a function of the sample's number."""

"""Everything of the extraction tool that is neither the model nor the command line."""

"""Extracts activations of language models. Each folder begins with what it owns."""

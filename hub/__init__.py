"""Models of the Hugging Face Hub: which file a name means, what it will do here, and fetching it."""

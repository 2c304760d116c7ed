"""Plan registry files: format, codec, fingerprint, store. No torch."""

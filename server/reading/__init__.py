"""From the bytes of a request to what it asks for, prompts in tokens included; large ones in a process of their own."""

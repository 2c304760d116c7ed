"""From tokens to what clients read: characters, stop strings, reasoning, calls of tools; and prompts from chats."""

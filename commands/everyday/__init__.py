"""Commands for every day: chat, what models there are, what is wrong with the machine."""

"""Parts of drawing a token: what each sampler of the chain keeps, what a grammar allows."""

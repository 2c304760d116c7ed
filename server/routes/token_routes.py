"""POST /tokenize, /detokenize and /apply-template, GET /tokenizer_info: in vLLM's and llama.cpp's forms at once."""

from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import Reply, Whole, reply_json
from pshard.server.reading import read_requests


async def tokenize(desk: Desk, call: Call) -> Reply:
    """Tokens of a text or a chat. Raises Fault without either."""
    return Whole(await desk.read(read_requests.tokenize, call.body))


async def detokenize(desk: Desk, call: Call) -> Reply:
    """The text of tokens, special ones spelled out."""
    return Whole(await desk.read(read_requests.detokenize, call.body))


async def apply_template(desk: Desk, call: Call) -> Reply:
    """A chat as the template writes it, without an answer. Raises Fault."""
    return reply_json({"prompt": await desk.read(read_requests.write_template, call.body)})


async def tell_tokenizer(desk: Desk, call: Call) -> Reply:
    """What harnesses ask of the tokenizer: its begin and end, the template, the context."""
    tokenizer, model = desk.reader.prompts.find_tokenizer("tokenizer"), desk.model
    ends = sorted(tokenizer.eos_ids)
    return reply_json(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": tokenizer.bos_text or None,
            "bos_token_id": tokenizer.bos_id,
            "eos_token": tokenizer.eos_text or None,
            "eos_token_id": ends[0] if ends else None,
            "eos_token_ids": ends,
            "chat_template": model.template,
            "vocab_size": model.vocab,
            "model_max_length": model.context,
        }
    )

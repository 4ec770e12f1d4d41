"""Text handling of a checkpoint folder: tokenizer, chat template, detokenizer, stop strings. No torch.

Text is made and watched where requests enter (the coordinator, `loopline run`), never on workers.
"""

from loopline.text.codec import TextCodec, load_text
from loopline.text.stream import TextStream

__all__ = ["TextCodec", "TextStream", "load_text"]

"""A byte-level tokenizer without merges: any text goes in and comes out again, one token a byte."""

from __future__ import annotations

import json
from pathlib import Path

END = "<|endoftext|>"
END_ID = 256
VOCAB_SIZE = 257


def save_byte_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers and vLLM read them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    assert tokenizer.token_to_id(END) == END_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "pad_token": END,
                "clean_up_tokenization_spaces": False,
            },
            indent=2,
        )
    )

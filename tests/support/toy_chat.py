"""A chat template for the byte tokenizer: `<s>`, then for each turn `<u>question`, a line break and `<a>answer</s>`."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toy_language_model import toy_tokenizer
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<u>' + (message['content'] | trim) + '\\n' }}{% else %}"
    "{{ '<a>' }}{{ message['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def chat_tokenizer(template: str = CHAT, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """The byte tokenizer with a chat template; `merges` (BPE) add tokens of several bytes."""
    tokenizer = toy_tokenizer()
    if merges:
        vocabulary = tokenizer.get_vocab()
        vocabulary |= {a + b: len(vocabulary) + at for at, (a, b) in enumerate(merges)}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer

"""German and English sentences of Multi30k and Tatoeba, and a tokenizer trained on them."""

import gzip
import io
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

__all__ = ["Pairs", "multi30k", "tatoeba", "tokenizer_of"]

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"


class Pairs(NamedTuple):
    """Sentences and their translations."""

    german: list[str]
    english: list[str]

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(self.german + other.german, self.english + other.english)


def multi30k(folder: Path, part: str) -> Pairs:
    """Read Multi30k, task 1: PART.de.gz and PART.en.gz (or unpacked), one sentence per line."""
    return Pairs(*(_lines(folder / f"{part}.{language}") for language in ("de", "en")))


def tatoeba(folder: Path) -> Pairs:
    """Read pairs.tsv.gz: English, tab, German."""
    pairs = [line.split("\t") for line in _lines(folder / "pairs.tsv")]
    return Pairs([german for _, german in pairs], [english for english, _ in pairs])


def _lines(path: Path) -> list[str]:
    packed = path.with_name(path.name + ".gz")
    if packed.exists():
        text = gzip.decompress(packed.read_bytes()).decode("utf-8")
    else:
        text = path.read_text(encoding="utf-8")
    return [line.strip() for line in text.strip().split("\n")]


def tokenizer_of(pairs: Pairs, size: int) -> PreTrainedTokenizerFast:
    """Train a SentencePiece vocabulary (unigram) on both languages, and return its tokenizer."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*pairs.german, *pairs.english]),
        model_writer=written,
        vocab_size=size,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece=PAD,
        eos_piece=EOS,
        unk_piece=UNK,
        normalization_rule_name="nfkc",
        minloglevel=2,
    )
    learned = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [(learned.id_to_piece(i), learned.get_score(i)) for i in range(len(learned))]
    fast = Tokenizer(models.Unigram(pieces, unk_id=2))
    fast.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(_spaces(), " "), normalizers.Strip()]
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    fast.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    fast.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token=PAD, eos_token=EOS, unk_token=UNK
    )


def _spaces() -> Any:
    from tokenizers import Regex

    return Regex(r"\s+")

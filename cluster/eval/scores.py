"""Scores generated texts against references: BLEU, chrF, ROUGE, exact match and F1.

sacrebleu computes BLEU and chrF, rouge-score computes ROUGE.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from ...proto.errors import Unavailable


def score_texts(texts: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Scores each text against its references, at least one.

    Returns scores by name, from 0 to 100; higher is better. With several references, all scores but
    BLEU (Papineni et al., 2002) and chrF (Popović, 2015), which are of the corpus, use the best
    one. The others are means over the texts; those of ROUGE (Lin, 2004) are F-measures. Raises
    Unavailable without the extra `eval`.
    """
    sacrebleu, rouge_scorer = import_libraries()
    streams = list(zip_longest(*references))
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    pairs = list(zip(texts, references, strict=True))
    rouges = [scorer.score_multi(list(refs), text) for text, refs in pairs]
    return {
        "bleu": float(sacrebleu.corpus_bleu(list(texts), streams).score),
        "chrf": float(sacrebleu.corpus_chrf(list(texts), streams).score),
        "rouge1": 100 * fmean(each["rouge1"].fmeasure for each in rouges),
        "rouge2": 100 * fmean(each["rouge2"].fmeasure for each in rouges),
        "rouge_l": 100 * fmean(each["rougeL"].fmeasure for each in rouges),
        "exact_match": 100
        * fmean(max(exact_match(text, ref) for ref in refs) for text, refs in pairs),
        "f1": 100 * fmean(max(word_f1(text, ref) for ref in refs) for text, refs in pairs),
    }


def normalise_answer(text: str) -> str:
    """Returns lower case text without punctuation, articles and repeated white space.

    As SQuAD's evaluation script (Rajpurkar et al., 2016).
    """
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(text: str, reference: str) -> bool:
    """Returns True if both texts are equal when normalised."""
    return normalise_answer(text) == normalise_answer(reference)


def word_f1(text: str, reference: str) -> float:
    """Returns the harmonic mean of precision and recall of the normalised words, from 0 to 1.

    As in SQuAD 2.0, 1 if neither text has words (Rajpurkar et al., 2018).
    """
    found = normalise_answer(text).split()
    wanted = normalise_answer(reference).split()
    if not found or not wanted:
        return float(found == wanted)
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted))


def import_libraries() -> tuple[Any, Any]:
    """Returns sacrebleu and rouge_scorer; the import takes a second.

    Raises Unavailable if the extra `eval` is not installed.
    """
    try:
        import sacrebleu
        from rouge_score import rouge_scorer
    except ImportError:
        text = (
            "tandem eval generate needs sacrebleu and rouge-score: pip install 'tandem-llm[eval]'"
        )
        raise Unavailable(text) from None
    return sacrebleu, rouge_scorer

"""Chat with a Gemma 4 and its MTP assistant, which drafts on the target's own KV cache.

    python examples/gemma4_mtp.py                                  # the bundled pair
    python examples/gemma4_mtp.py --compare --prompt "..." --prompt "..."
    python examples/gemma4_mtp.py --model E4B --prompt "Why is the sky blue?"
    python examples/gemma4_mtp.py --model DIR --drafter DIR --draft-topk 4 --nodes 16 --temperature 1

The answer is printed as it is made, text from accepted drafts in colour. `--compare` decodes without drafts as well
and fails if the text differs. The pairs by name (`--models` prints this table):

name     target                              drafter                                               steps  accepted   memory
E2B      google/gemma-4-E2B-it               google/gemma-4-E2B-it-assistant                       2                 9.4 GB bfloat16
E4B      google/gemma-4-E4B-it               google/gemma-4-E4B-it-assistant                       4                 15.1 GB bfloat16
12B      google/gemma-4-12B-it               google/gemma-4-12B-it-assistant                       4                 24.7 GB bfloat16
26B-A4B  google/gemma-4-26B-A4B-it           google/gemma-4-26B-A4B-it-assistant                   4      3.68 of 5  51.3 GB bfloat16
31B      google/gemma-4-31B-it               google/gemma-4-31B-it-assistant                       8      5.37 of 8  62.3 GB bfloat16
E2B-QAT  google/gemma-4-E2B-it-qat-w4a16-ct  google/gemma-4-E2B-it-qat-q4_0-unquantized-assistant  2                 6.7 GB int4
E4B-QAT  google/gemma-4-E4B-it-qat-w4a16-ct  google/gemma-4-E4B-it-qat-q4_0-unquantized-assistant  4                 9.4 GB int4
12B-QAT  google/gemma-4-12B-it-qat-w4a16-ct  google/gemma-4-12B-it-qat-q4_0-unquantized-assistant  4                 9.0 GB int4
31B-QAT  google/gemma-4-31B-it-qat-w4a16-ct  google/gemma-4-31B-it-qat-q4_0-unquantized-assistant  8                 20.2 GB int4

Steps: where vLLM's figures for one H100 were best (PR 41745; 12B is not among them). Deep drafts pay most where the
target is large and dense; a mixture of experts (26B-A4B) reads more experts for every further draft. QAT targets were
trained for int4, and accept more drafts of an assistant trained for it too. Memory is that of the weights; the KV cache
takes a share of what is left. On a CPU the default is float32, twice the memory of bfloat16. The names are those of the
hub; the tests here run the bundled pair only."""  # noqa: E501 - names of published checkpoints

from compare_pair import run

from specdec.models.published import PAIR_GROUPS

BUNDLED, *_ = PAIR_GROUPS["bundled"]
PAIRS = PAIR_GROUPS["gemma4"] + PAIR_GROUPS["gemma4 QAT"]

PROMPT = "Tom has 3 boxes of 12 pencils. He gives away 7 pencils. How many pencils are left?"

if __name__ == "__main__":
    run(__doc__, PAIRS, BUNDLED, PROMPT)

"""Chat with a Llama, Qwen3, GPT-OSS or any other target and an EAGLE-3 head for it.

    python examples/eagle3.py                                      # the bundled target and head
    python examples/eagle3.py --compare --draft-topk 4 --nodes 16
    python examples/eagle3.py --model Qwen3-8B --prompt "..." --prompt "..."
    python examples/eagle3.py --model meta-llama/Llama-3.1-8B-Instruct --drafter DIR --steps 6

The answer is printed as it is made, text from accepted drafts in colour. `--compare` decodes without the head as well
and fails if the text differs. Published heads by the name of their target (`--models` prints this table):

name               target                                           drafter                                          steps  accepted   memory
Llama-3.1-8B       meta-llama/Llama-3.1-8B-Instruct                 yuhuili/EAGLE3-LLaMA3.1-Instruct-8B              5      3.34 of 8  16.9 GB bfloat16
Qwen3-8B           Qwen/Qwen3-8B                                    RedHatAI/Qwen3-8B-speculator.eagle3              5      3.48 of 6  17.2 GB bfloat16
Qwen3-32B          Qwen/Qwen3-32B                                   RedHatAI/Qwen3-32B-speculator.eagle3             5                 69 GB bfloat16
Qwen3-30B-A3B      Qwen/Qwen3-30B-A3B                               AngelSlim/Qwen3-a3B_eagle3                       4                 61.4 GB bfloat16
Llama-3.3-70B      RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16  yuhuili/EAGLE3-LLaMA3.3-Instruct-70B             5                 43.7 GB int4
Mistral-Small-24B  mistralai/Mistral-Small-24B-Instruct-2501        cvalgian/EAGLE3-Mistral-Small-24B-Instruct-2501  4                 48.8 GB bfloat16
gpt-oss-20b        openai/gpt-oss-20b                               RedHatAI/gpt-oss-20b-speculator.eagle3           3                 15.0 GB MXFP4
gpt-oss-120b       openai/gpt-oss-120b                              lmsys/EAGLE3-gpt-oss-120b-bf16                   3                 69.4 GB MXFP4

Other heads by `--drafter`, in the formats of SafeAILab / SpecForge, NVIDIA ModelOpt and speculators; for instance
RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3, AngelSlim/Qwen3-8B_eagle3, nvidia/gpt-oss-120b-Eagle3-v3. Heads are
made for one target and its chat template. gpt-oss gains from 2 or 3 drafts, hardly from more. Memory is that of the
weights; the KV cache takes a share of what is left. The names are those of the hub; the tests here run the
bundled head only.
"""  # noqa: E501 - names of published checkpoints

from compare_pair import run

from specdec.models.published import PAIR_GROUPS

_, BUNDLED, *_ = PAIR_GROUPS["bundled"]

PROMPT = (
    "A tank holds 35 gallons of water. Water flows in at 13 gallons a minute and leaks out at 3 gallons a minute. "
    "How many gallons are in the tank after 13 minutes?"
)

if __name__ == "__main__":
    run(__doc__, PAIR_GROUPS["EAGLE-3"], BUNDLED, PROMPT)

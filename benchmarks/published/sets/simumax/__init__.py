"""SimuMax: Llama-3 and DeepSeek with few blocks, trained by Megatron-LM in bf16 on eight B200."""

"""What a checkpoint is converted from: Hugging Face folders, GGUF, quantized folders, llama2.c."""

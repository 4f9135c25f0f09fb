"""How a Hugging Face model trains and is published."""

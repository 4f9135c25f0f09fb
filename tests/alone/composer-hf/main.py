"""Train a tiny language model of transformers for a few steps, and publish it as a folder."""

from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from composer_checkpoint import save_file
from composer_hf import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint

torch.manual_seed(0)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = HuggingFaceModel(GPT2LMHeadModel(config))
tokens = torch.arange(8).repeat(4, 2)
batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for _ in range(20):
    loss = model.loss(model(batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

folder = Path(mkdtemp())
state = {"model": model.state_dict(), "integrations": {"huggingface": model.get_metadata()}}
save_file({"state": state}, folder / "ba20.pt")
write_huggingface_pretrained_from_composer_checkpoint(folder / "ba20.pt", folder / "published")
again = GPT2LMHeadModel.from_pretrained(folder / "published")
with torch.no_grad():
    assert torch.equal(again.eval()(tokens).logits, model.model.eval()(tokens).logits)
assert losses[-1] < losses[0] / 2
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; {sorted(path.name for path in (folder / 'published').iterdir())}")

"""torchrun --nproc-per-node=4 train.py"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig

from attnroute.integrations.transformers import register

register()
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
if device == "cuda":
    torch.cuda.set_device(mesh.get_rank() % torch.cuda.device_count())

torch.manual_seed(0)  # The same weights on every rank.
sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **sizes)
model = AutoModelForCausalLM.from_config(config, attn_implementation="attnroute").to(device)

over_columns, over_rows = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
styles = {f"self_attn.{name}": ColwiseParallel() for name in over_columns}
styles |= {f"self_attn.{name}": RowwiseParallel() for name in over_rows}
styles |= {
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    parallelize_module(layer, mesh["tp"], styles)  # Each rank has half of the heads,
    fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)  # and a half of their weights.
fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

torch.manual_seed(1 + mesh.get_local_rank("dp"))  # Ranks of tp have the same tokens.
rows = torch.randint(64, (2, 128), device=device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)  # Weights lie on several meshes.
loss = model(input_ids=rows, labels=rows, use_cache=False).loss
loss.backward()
optimizer.step()

from diffusers import DiffusionPipeline

from attnroute.integrations.diffusers import register

register()
pipeline = DiffusionPipeline.from_pretrained("black-forest-labs/FLUX.1-dev")
pipeline.transformer.set_attention_backend("attnroute")

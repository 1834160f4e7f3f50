"""Artifacts on the Hugging Face hub, by the conventions of `huggingface_hub`: `docs/hub.md` tells them to users.

find (a file, a folder or a hub name as a file on this machine), push (the artifact and its card as one commit), card (the
README.md), client (the hub's, with a token that never shows), failures (whatever goes wrong there, in one line)
"""

"""Artifacts on the Hugging Face hub, by the conventions of `huggingface_hub`; `docs/hub.md` is the guide for users.

find (the local file for a file, a folder or a hub name), push (the artifact and its card as one commit), save (both into a folder),
card (the README.md), client (the hub's client), failures (the client's errors as one line, without the token)
"""

"""The testbed: a small language model trained from nothing, and the generated documents it learns to retrieve from.

documents     generators (keyed lines, multi-query, needles, copying), words, splits, running_text
training      phase, curriculum, token_rows, corpus, tokenizer, pretraining_data, language_model
measuring     cases, scores, proportion, trigram
shipping      export, training_record, model_card
"""

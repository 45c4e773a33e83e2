"""BERT sentence encoders, alone and with a head: the loaders `bert_encoder`, `embedding_head`."""

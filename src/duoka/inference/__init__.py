"""Inference over every device: `duoka.predict`.

    data ──sources.py──► batches, read one after the other and numbered
    batches ──crew.py──► whichever device is ready for one      a thread for each device
    a device ──replica.py──► its own copy of the model computes the batch; halves it where memory runs out
    outputs ──predict.py──► put in order, and handed out one by one

sharing.py  the ranks of a job share the batches out
rows.py     batches and outputs of any structure, by rows
calling.py  how a model is called with a batch
"""

"""Inference over every device: `duoka.predict`.

    data ──batches.py──► batches, read in order and numbered; their rows
    batches ──replicas.py──► the next device that is free computes one on its copy of the model, in its own thread
    outputs ──predict.py──► in the order of the data, one by one, also over the ranks of a job

files.py    the model, the data and the file of outputs of `duoka predict`
"""

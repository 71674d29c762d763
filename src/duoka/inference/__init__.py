"""Inference over every device: `duoka.predict`.

    data ──sources.py──► batches, read in order and numbered
    batches ──pool.py──► the next device with room     one thread for each device
    device ──replica.py──► computes the batch on its copy of the model; halves it when memory runs out
    outputs ──predict.py──► in the order of the data, one by one

sharing.py  ranks of a job divide the batches
rows.py     batches and outputs of any structure, by rows
calling.py  maps a batch to the arguments of `forward`
loading.py, writing.py    the model, data and output file of `duoka predict`
"""

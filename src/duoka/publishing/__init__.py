"""Publish a script's progress for `duoka watch` and reports: its own process writes it to the status board.

publisher   the board, its writer, and where the functions below are installed
steps       steps of optimizers, batches of loaders
output      lines that are printed
values      TensorBoard's and W&B's calls
bars        progress bars of tqdm and rich
epochs      the loop over epochs around a loop over a loader

Nothing here imports torch: each function waits until the script has imported what it observes.
"""

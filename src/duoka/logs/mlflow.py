"""`mlflow` or `mlflow:EXPERIMENT`."""

from __future__ import annotations

from duoka.logs.base import Log, Value, library


class Mlflow(Log):
    """An MLflow run. A run that the script has started is used, and not ended."""

    def __init__(self, place: str) -> None:
        self._mlflow = library("mlflow", "mlflow", "mlflow")
        if place:
            self._mlflow.set_experiment(place)
        self._own = self._mlflow.active_run() is None
        if self._own:
            self._mlflow.start_run()

    def write(self, step: int | None, values: dict[str, Value]) -> None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        self._mlflow.log_metrics(numbers, step=step)
        for name, value in values.items():
            if isinstance(value, str):
                self._mlflow.set_tag(name, value)

    def close(self, failed: bool) -> None:
        if self._own:
            self._mlflow.end_run("FAILED" if failed else "FINISHED")

"""`calib fit --config tiny.yaml`: measure a model's keys and values and write one artifact."""

from calib.fit.command import run

__all__ = ["run"]

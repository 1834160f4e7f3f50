"""What `calib fit --plan` does: make the plan of the fit and print it."""

from calib.fit.options import FitCLI
from calib.plan.plan import make_plan
from calib.plan.run_command import write_plan
from calib.plan.text import plan_text


def tell(cli: FitCLI) -> None:
    """Prints what the fit would capture, its memory, disk space and time; writes nothing except `--plan_json`, if given."""
    config, trainer = cli.config, cli.trainer
    plan = make_plan(
        cli.model,
        cli.datamodule,
        int(config.seed_everything),
        config.plan_batch,
        config.plan_context,
        trainer.strategy.root_device,
        trainer.world_size,
    )
    print(plan_text(plan))
    write_plan(plan, config.plan_json)

"""What a deployment runs beside its jobs: sensors that release the pools of failed runs and report costs, and the
sweep.
"""

import json
from collections.abc import Sequence
from typing import Any

import dagster as dg

import skyward_core as sky
from dagster_skyward.backfills import is_pool_of_backfill, runs_to_come
from dagster_skyward.run_steps import KEEP_TAG, WILL_RETRY_TAG, pools_of, release_pools
from dagster_skyward.settlement import forget_parents, report_rests, settle_ended_runs


def upkeep(cron_schedule: str = "*/10 * * * *", *, providers: Sequence[sky.Provider] | None = None) -> dg.Definitions:
    """Return three sensors and a scheduled job, for `dg.Definitions.merge`.

    `skyward_release_after_failure` and `skyward_release_after_cancel` end the pools that the steps of such a run share,
    except if the run is tried again or its resource has `keep_on_failure`. `skyward_report_costs` writes what is
    missing of the costs of ended runs, and of pools that belong to no run, as observations. `skyward_sweep` ends
    machines of dead pools. It queries `providers` too for machines that the ledger does not have; None means those of
    the settings.
    """
    sweep = _sweep_job(providers)
    return dg.Definitions(
        jobs=[sweep],
        schedules=[dg.ScheduleDefinition(job=sweep, cron_schedule=cron_schedule)],
        sensors=[
            dg.run_failure_sensor(name="skyward_release_after_failure", default_status=dg.DefaultSensorStatus.RUNNING)(
                _after_failure
            ),
            dg.run_status_sensor(
                name="skyward_release_after_cancel",
                run_status=dg.DagsterRunStatus.CANCELED,
                default_status=dg.DefaultSensorStatus.RUNNING,
            )(_after_cancel),
            dg.sensor(
                name="skyward_report_costs",
                minimum_interval_seconds=30,
                default_status=dg.DefaultSensorStatus.RUNNING,
            )(_report_costs),
        ],
    )


def _report_costs(context: dg.SensorEvaluationContext) -> dg.SkipReason:
    """Report what the processes of runs could not: their pools had not ended, or they were killed. The cursor has the
    pools that belong to no run and have not ended.
    """
    open_pools = report_rests(context.instance, json.loads(context.cursor or "[]"))
    settled = settle_ended_runs(context.instance, open_pools)
    context.update_cursor(json.dumps(sorted(open_pools)))
    forget_parents(context.instance)
    return dg.SkipReason(f"all costs are reported of: {', '.join(settled) or 'no further run'}")


def release_after(run: dg.DagsterRun, instance: dg.DagsterInstance | None = None) -> str:
    """Release the pools of a run that has failed or was canceled; return what was done, in words. `instance` is needed
    for runs of a backfill.
    """
    if run.tags.get(WILL_RETRY_TAG) == "true":
        return "the run is tried again, and may use its pools"
    if run.status is dg.DagsterRunStatus.FAILURE and KEEP_TAG in run.tags:
        return "its pools stay after a failure, by lifecycle.keep_on_failure or lifecycle.cleanup"
    if not pools_of(run):
        return "the run has no shared pools"
    if is_pool_of_backfill(run) and (instance is None or runs_to_come(instance, run, set())):
        return "other runs of its backfill may use its pools"
    return f"released: {', '.join(release_pools(run)) or 'none'}"


def _after_failure(context: dg.RunFailureSensorContext) -> dg.SkipReason:
    return dg.SkipReason(release_after(context.dagster_run, context.instance))


def _after_cancel(context: dg.RunStatusSensorContext) -> dg.SkipReason:
    return dg.SkipReason(release_after(context.dagster_run, context.instance))


def _sweep_job(providers: Sequence[sky.Provider] | None) -> dg.JobDefinition:
    @dg.op(
        name="skyward_sweep_op",
        config_schema={"is_dry_run": dg.Field(bool, default_value=False, description="Only log what would end.")},
    )
    def sweep(context: dg.OpExecutionContext) -> None:
        """End machines of dead pools. Fails if some could not be listed or ended."""
        report = sky.sweep(providers=providers, is_dry_run=context.op_config["is_dry_run"])
        for finding in report.findings:
            context.log.info("%s", _as_line(finding))
        for line in report.pruned:
            context.log.info("removed, because it is not used any more: %s", sky.shown_text.visible(line))
        metadata = {"findings": len(report.findings), "ended": [_as_line(finding) for finding in report.ended]}
        if report.failures:
            raise dg.Failure(
                "some machines could not be listed or ended; the next sweep tries again: "
                + "; ".join(sky.shown_text.visible(str(failure)) for failure in report.failures),
                metadata=metadata,
            )
        context.add_output_metadata(metadata)

    @dg.job(name="skyward_sweep")
    def skyward_sweep() -> None:
        sweep()

    return skyward_sweep


def _as_line(finding: Any) -> str:
    return sky.shown_text.visible(
        f"{finding.action} {', '.join(finding.resource_ids)} of {finding.pool_id} at {finding.provider}:"
        f" {finding.reason}"
    )

"""What Prefect's UI shows of the pools of a flow run: artifacts, events and labels.

`run_report.RunReport` owns the state and the thread. `pool_state`, `series`, `pages` and `notices` are pure.
`prefect_api` sends the requests.
"""

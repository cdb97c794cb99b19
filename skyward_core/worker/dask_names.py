"""The undocumented names of Dask that this package uses, on both sides. `tests/unit/worker/test_dask_names.py` fails
if a Dask version lacks one.

A name is `module:Class.method(parameters)`, `module:Class.attribute` or `module:name`. `pyproject.toml` allows no Dask
that is newer than the versions tested here; CI's step with the newest versions tests newer ones and says when the bound
may move.
"""

CLIENT = (
    # engine/connection.py: our messages in the client's stream, in order with Dask's
    "distributed.client:Client._send_to_scheduler(msg)",
    "distributed.client:Client.scheduler_comm",
    "distributed.client:Client.loop",
    # engine/connection.py: a question of the scheduler for this client's calls
    "distributed.client:Client._stream_handlers",
    # engine/connection.py: a client without automatic reconnect
    "distributed.client:Client._reconnect()",
    # engine/connection.py: a loop of ours in place of Dask's, with the methods that the client calls
    "distributed.client:Client._loop_runner",
    "distributed.utils:LoopRunner.start()",
    "distributed.utils:LoopRunner.stop(timeout)",
    "distributed.utils:LoopRunner.is_started()",
    "distributed.utils:LoopRunner.loop",
    # engine/connection.py: how tasks end, without futures
    "distributed.client:Client._handle_key_in_memory(key, type, workers)",
    "distributed.client:Client._handle_task_erred(key, exception, traceback)",
    "distributed.client:Client._handle_cancelled_keys(keys, reason, msg)",
    "distributed.client:Client._handle_restart()",
    "distributed.scheduler:Scheduler.gather(keys)",
    # engine/connection.py: a user's client, whose streams send at once and outlive a frozen scheduler
    "distributed.client:Client._ensure_connected(timeout)",
    "distributed.comm.tcp:TCP.stream",
    "distributed.client:ClosedClientError",
    # engine/connection.py: a stream whose messages are data, and none of Dask's handlers that unpickle
    "distributed.client:Client._handle_report()",
    "distributed.client:Client._handle_event(topic, event)",
    "distributed.client:Client._handle_error()",
    "distributed.client:Client._update_scheduler_info(n_workers)",
    "distributed.client:Client._adjust_heartbeat_intervals(interval)",
    "distributed.client:Client._default_event_handlers",
    "distributed.client:Client._event_handlers",
    # engine/data_stream.py: Dask's frames, read without what unpickles them
    "distributed.comm.registry:backends",
    "distributed.comm.core:Comm.deserialize",
    "distributed.comm.tcp:TLS.read(deserializers)",
    "distributed.comm.tcp:TLS._closed",
    "distributed.comm.tcp:TLS.abort()",
    "distributed.comm.tcp:TLSConnector.prefix",
    "distributed.comm.tcp:TLSConnector.comm_class",
    "distributed.comm.tcp:TLSBackend._connector_class",
    "distributed.comm.tcp:convert_stream_closed_error(obj, exc)",
    "distributed.comm.tcp:read_bytes_rw(stream, n)",
    "distributed.protocol.utils:unpack_frames(b, partial)",
)
STREAMS = (
    # wire/streams.py: send at once
    "distributed.batched:BatchedSend.send(msgs)",
    "distributed.batched:BatchedSend.buffer",
    "distributed.batched:BatchedSend.waker",
    "distributed.batched:BatchedSend.next_deadline",
    "distributed.batched:BatchedSend.loop",
    "distributed.batched:BatchedSend.comm",
    "distributed.comm.core:Comm.allow_offload",
)
SCHEDULER = (
    # worker/calls.py, worker/scheduler.py: our operations
    "distributed.scheduler:Scheduler.handlers",
    "distributed.scheduler:Scheduler.stream_handlers",
    "distributed.scheduler:Scheduler.send_all(client_msgs, worker_msgs)",
    "distributed.scheduler:Scheduler.stream_comms",
    "distributed.scheduler:Scheduler.client_comms",
    # worker/calls.py: tasks outlive the connection of their client
    "distributed.scheduler:Scheduler.client_desires_keys(keys, client)",
    "distributed.scheduler:Scheduler.client_releases_keys(keys, client, stimulus_id)",
    "distributed.scheduler:Scheduler.stimulus_cancel(keys, client, force, reason, msg)",
    "distributed.scheduler:ClientState.wants_what",
    "distributed.scheduler:TaskState.who_wants",
    "distributed.scheduler:TaskState.processing_on",
    "distributed.scheduler:TaskState.suspicious",
    "distributed.scheduler:TaskState.annotations",
    "distributed.scheduler:WorkerState.processing",
    "distributed.scheduler:WorkerState.executing",
    "distributed.scheduler:WorkerState.last_seen",
    # worker/scheduler.py: a worker that gets no more calls
    "distributed.scheduler:Scheduler.handle_worker_status_change(status, worker, stimulus_id)",
    # worker/scheduler.py: when a worker counts as lost; graphs with long imports; clients that may connect
    "distributed.scheduler:Scheduler.check_worker_ttl()",
    "distributed.scheduler:Scheduler.remove_worker(address, stimulus_id)",
    "distributed.scheduler:Scheduler.update_graph(client, expr_ser)",
    "distributed.scheduler:Scheduler.add_client(comm, client, versions)",
    "distributed.scheduler:heartbeat_interval(n)",
    "distributed.scheduler:DEFAULT_EXTENSIONS",
    "distributed.spans:SpanMetadata",
    "distributed.protocol.serialize:deserialize(header, frames)",
    "distributed.utils:offload",
    # worker/dask_pages.py: Dask's plain pages, made on request
    "distributed.http.utils:get_handlers(server, modules)",
    "distributed.http.scheduler.info:routes",
)
WORKER = (
    # worker/pool_worker.py: a worker that ends without waiting for calls, and handles our operations
    "distributed.worker:Worker.close(timeout, executor_wait, nanny, reason)",
    "distributed.worker:Worker.batched_stream",
    "distributed.worker:Worker.stream_handlers",
    "distributed.worker:Worker.metrics",
    "distributed.worker:Worker.status",
    "distributed.threadpoolexecutor:ThreadPoolExecutor._adjust_thread_count()",
    "dask.task_spec:Task",
)

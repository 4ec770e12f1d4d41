"""Every metric that a process of a cluster shows. `docs/metrics.md` is the same list for people, and a test compares.

Names follow Prometheus' conventions, and vLLM's where it has the like. Labels are few, and every label's values are
known beforehand.
"""

from loopline.telemetry.metrics import Definition, Kind

# ---- both kinds of process -------------------------------------------------------------------------------------------

IGNORED = Definition(
    "loopline_ignored_messages_total", Kind.COUNTER, "Messages that changed nothing, by why.", ("cause",)
)
WAITING = Definition("loopline_num_requests_waiting", Kind.GAUGE, "Requests that wait in this process.")
RUNNING = Definition(
    "loopline_num_requests_running", Kind.GAUGE, "Requests that workers have; on a worker, those that hold blocks."
)

# ---- the coordinator -------------------------------------------------------------------------------------------------

REQUESTS = Definition("loopline_requests_total", Kind.COUNTER, "Requests that ended, by how.", ("ending",))
REFUSED = Definition(
    "loopline_refused_requests_total", Kind.COUNTER, "Requests that were refused because the queue was full."
)
FAILED_ATTEMPTS = Definition(
    "loopline_failed_attempts_total",
    Kind.COUNTER,
    "Attempts at a request that workers could not finish, by why.",
    ("cause",),
)
LOST_WORKERS = Definition(
    "loopline_lost_workers_total", Kind.COUNTER, "Workers that were lost, by what showed it.", ("reason",)
)
REBALANCES = Definition(
    "loopline_rebalances_total",
    Kind.COUNTER,
    "Workers that were moved from one role to the other, by the role that got one.",
    ("to",),
)
WORKERS = Definition("loopline_workers", Kind.GAUGE, "Workers, by role and state.", ("role", "state"))
SERVING = Definition("loopline_serving", Kind.GAUGE, "1 while requests are served, else 0.")
TTFT = Definition(
    "loopline_time_to_first_token_seconds", Kind.HISTOGRAM, "From a request's arrival to its first new token."
)
ITL = Definition(
    "loopline_inter_token_latency_seconds", Kind.HISTOGRAM, "Between two tokens of a request, recoveries included."
)
QUEUE_TIME = Definition(
    "loopline_request_queue_time_seconds", Kind.HISTOGRAM, "From a request's arrival until a worker was asked."
)
E2E = Definition("loopline_e2e_request_latency_seconds", Kind.HISTOGRAM, "From a request's arrival to its end.")
PREFIX_SOURCES = Definition(
    "loopline_prefix_sources_total",
    Kind.COUNTER,
    "Requests that ended, by how their prompt's KV got to their decode worker.",
    ("source",),
)
PROMPT_TOKENS = Definition("loopline_prompt_tokens_total", Kind.COUNTER, "Prompt tokens of requests that ended.")
CACHED_TOKENS = Definition(
    "loopline_prompt_tokens_cached_total",
    Kind.COUNTER,
    "Of these, those whose KV the worker that computed the prompt has found.",
)
GENERATION_TOKENS = Definition("loopline_generation_tokens_total", Kind.COUNTER, "Tokens that clients were given.")

COORDINATOR = (
    REQUESTS,
    REFUSED,
    FAILED_ATTEMPTS,
    LOST_WORKERS,
    REBALANCES,
    IGNORED,
    WAITING,
    RUNNING,
    WORKERS,
    SERVING,
    TTFT,
    ITL,
    QUEUE_TIME,
    E2E,
    PREFIX_SOURCES,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    GENERATION_TOKENS,
)

# ---- workers: what they compute --------------------------------------------------------------------------------------

TOKEN_LOOPS = Definition(
    "loopline_token_loops_total", Kind.COUNTER, "Token-loops (tokens x depth) that steps computed.", ("phase",)
)
COMPUTED_TOKENS = Definition(
    "loopline_computed_tokens_total", Kind.COUNTER, "Tokens that steps computed, at whatever depth.", ("phase",)
)
STEP_SECONDS = Definition(
    "loopline_step_seconds", Kind.HISTOGRAM, "What an engine step took, by what was in it.", ("rows",)
)
FAILED_STEPS = Definition("loopline_failed_steps_total", Kind.COUNTER, "Steps that could not be computed.")
SLOW_STEPS = Definition(
    "loopline_steps_past_bound_total",
    Kind.COUNTER,
    "Steps with tokens of answers and of prompts that took longer than decode.max_time_per_token_s.",
)
LEAST_SHARES = Definition(
    "loopline_least_prefill_shares_total",
    Kind.COUNTER,
    "Steps that carried the smallest share of prompts although even that was expected to take longer.",
)
PREEMPTIONS = Definition(
    "loopline_preemptions_total", Kind.COUNTER, "Requests that gave their blocks back to be computed again."
)
PREFIX_QUERIES = Definition(
    "loopline_prefix_cache_queries_total", Kind.COUNTER, "Tokens of prompts that were looked for in the prefix cache."
)
PREFIX_HITS = Definition(
    "loopline_prefix_cache_hits_total", Kind.COUNTER, "Of these, those whose KV was found and not computed."
)
QUEUED_TOKEN_LOOPS = Definition(
    "loopline_queued_token_loops", Kind.GAUGE, "Work that waits, is reserved or runs, at each request's most tokens."
)

# ---- workers: blocks, handoffs, pushes -------------------------------------------------------------------------------

BLOCKS = Definition("loopline_kv_blocks", Kind.GAUGE, "Blocks of the arena, by state; they sum to all.", ("state",))
PROMISED_BLOCKS = Definition(
    "loopline_kv_blocks_promised", Kind.GAUGE, "Of the free blocks, those that requests may still grow into."
)
HANDOFFS = Definition(
    "loopline_handoffs", Kind.GAUGE, "Handoffs and fetches, by the state that they are in.", ("state",)
)
HANDOFF_STATES = Definition(
    "loopline_handoff_states_total",
    Kind.COUNTER,
    "Times that a handoff or fetch entered a state. Done: drained on a prefill worker, active or local on a decode "
    "worker, local on a unified one; of a fetch fetched on a prefill worker.",
    ("state",),
)
GIVEN_UP = Definition(
    "loopline_given_up_requests_total", Kind.COUNTER, "Requests that this worker gave up, by why.", ("cause",)
)
REFUSALS = Definition(
    "loopline_refusals_total", Kind.COUNTER, "Times that this worker did not take a request, by why.", ("cause",)
)
PUSHES = Definition("loopline_pushes_total", Kind.COUNTER, "Pushes that were posted and ended, by how.", ("result",))
PUSHED_BYTES = Definition("loopline_pushed_bytes_total", Kind.COUNTER, "Bytes of pushes that are done.")
PUSH_SECONDS = Definition(
    "loopline_push_seconds", Kind.HISTOGRAM, "From the post of a push until it was seen to be done."
)
FETCHED_BYTES = Definition(
    "loopline_fetched_bytes_total",
    Kind.COUNTER,
    "Bytes of prefixes that decode workers have pushed here, of requests whose prompts were then computed.",
)
IN_FLIGHT_BYTES = Definition("loopline_push_in_flight_bytes", Kind.GAUGE, "Bytes that are posted and on their way.")
LIMIT_BYTES = Definition("loopline_push_limit_bytes", Kind.GAUGE, "Most bytes that may be on their way.")
PUSHES_WAITING = Definition("loopline_pushes_waiting", Kind.GAUGE, "Pushes that wait for room among these.")
PUSH_WAIT = Definition(
    "loopline_push_wait_seconds_total", Kind.COUNTER, "How long pushes have waited for it, summed over all."
)

WORKER = (
    TOKEN_LOOPS,
    COMPUTED_TOKENS,
    STEP_SECONDS,
    FAILED_STEPS,
    SLOW_STEPS,
    LEAST_SHARES,
    PREEMPTIONS,
    PREFIX_QUERIES,
    PREFIX_HITS,
    QUEUED_TOKEN_LOOPS,
    WAITING,
    RUNNING,
    BLOCKS,
    PROMISED_BLOCKS,
    HANDOFFS,
    HANDOFF_STATES,
    GIVEN_UP,
    REFUSALS,
    IGNORED,
)
"""Of both roles."""

PREFILL_WORKER = (
    *WORKER,
    PUSHES,
    PUSHED_BYTES,
    PUSH_SECONDS,
    IN_FLIGHT_BYTES,
    LIMIT_BYTES,
    PUSHES_WAITING,
    PUSH_WAIT,
    FETCHED_BYTES,
)
"""Of a prefill worker."""

// The tabs of Skyward in Airflow's UI, with the React that Airflow provides. There is no build step.
const React = globalThis.React;
const h = React.createElement;
const REFRESH_MS = 10000;

const usd = (value) => `${(value ?? 0).toFixed(value && Math.abs(value) < 0.01 ? 6 : 4)} USD`;
const time = (text) => (text ? new Date(text).toLocaleTimeString() : "–");
const duration = (seconds) => (seconds >= 90 ? `${(seconds / 60).toFixed(1)} min` : `${seconds.toFixed(1)} s`);
const sum = (values) => values.reduce((total, value) => total + value, 0);

const BORDER = "1px solid rgba(128, 128, 128, 0.35)";
const COLOURS = ["#8ab4d8", "#5b8fc4", "#3f9a6b", "#c9b458", "#d08a4a", "#b85450", "#8c7aa9", "#9a9a9a"];

const NONE = { data: null, error: "" };

// What a route of the api-server answers, again and again; its user's cookie goes along.
function useAnswer(path, query) {
  const [state, setState] = React.useState(NONE);
  const url = new URL(`${path}?${new URLSearchParams(query)}`, document.baseURI).href;
  React.useEffect(() => {
    let isShown = true;
    const load = async () => {
      try {
        const response = await fetch(url, { credentials: "same-origin" });
        const body = await response.json();
        if (!response.ok) throw new Error(typeof body.detail === "string" ? body.detail : `status ${response.status}`);
        if (isShown) setState({ data: body, error: "" });
      } catch (error) {
        if (isShown) setState((before) => ({ ...before, error: error.message }));
      }
    };
    load();
    const timer = setInterval(load, REFRESH_MS);
    return () => {
      isShown = false;
      clearInterval(timer);
    };
  }, [url]);
  return state;
}

function Table({ head, rows }) {
  const cell = { padding: "4px 12px 4px 0", borderBottom: BORDER, textAlign: "left" };
  return h("table", { style: { borderCollapse: "collapse", width: "100%" } },
    h("thead", null, h("tr", null, head.map((name) => h("th", { key: name, style: cell }, name)))),
    h("tbody", null, rows.map((row, number) =>
      h("tr", { key: number }, row.map((value, place) => h("td", { key: place, style: cell }, value))))));
}

function Figures({ pairs }) {
  return h("div", { style: { display: "flex", gap: "32px", flexWrap: "wrap" } }, pairs.map(([name, value]) =>
    h("div", { key: name },
      h("div", { style: { fontSize: "0.8em", opacity: 0.7 } }, name),
      h("div", { style: { fontSize: "1.4em", fontWeight: 600 } }, value))));
}

function Section({ title, children }) {
  return h("section", { style: { marginTop: "20px" } },
    h("h3", { style: { fontWeight: 600, marginBottom: "6px" } }, title), children);
}

function Buckets({ pools }) {
  const totals = {};
  for (const pool of pools) {
    for (const [name, bucket] of Object.entries(pool.buckets)) {
      const total = (totals[name] ??= { cost: 0, seconds: 0 });
      total.cost += bucket.cost_usd;
      total.seconds += bucket.seconds;
    }
  }
  const shown = Object.entries(totals).map(([name, total], place) => ({ name, ...total, colour: COLOURS[place % 8] }))
    .filter((one) => one.cost > 0 || one.seconds > 0);
  const whole = sum(shown.map((one) => one.cost));
  let x = 0;
  const bars = whole > 0 ? shown.map((one) => {
    const width = (100 * one.cost) / whole;
    const bar = h("rect", { key: one.name, x, y: 0, width, height: 10, fill: one.colour });
    x += width;
    return bar;
  }) : [];
  return h(React.Fragment, null,
    h("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": "cost by bucket",
      style: { width: "100%", height: "18px", marginBottom: "8px" } }, bars),
    h(Table, { head: ["Bucket", "Time", "Cost"], rows: shown.map((one) => [
      h("span", null, h("span", { style: { color: one.colour } }, "■ "), one.name),
      duration(one.seconds), usd(one.cost)]) }));
}

const live = (pools) => pools.flatMap((pool) => pool.resources).filter((one) => one.bound_at && !one.gone_at);

function Nodes({ pools }) {
  return h(Table, {
    head: ["Machine", "Type", "Where", "USD per hour", "Requested", "Up", "Gone", "How it ended", "Cost"],
    rows: pools.flatMap((pool) => pool.resources).map((one) => [
      one.cloud_id ?? one.name, `${one.instance_type ?? ""}${one.is_spot ? " (spot)" : ""}`,
      [one.provider, one.region].filter(Boolean).join("/"), one.price_per_hour_usd.toFixed(4), time(one.intended_at),
      time(one.bound_at), time(one.gone_at), one.evidence ?? "", usd(one.cost_usd)]) });
}

function groups(pools, keyOf) {
  const found = new Map();
  for (const pool of pools) {
    const key = keyOf(pool);
    found.set(key, [...(found.get(key) ?? []), pool]);
  }
  return [...found].sort(([one], [other]) => one.localeCompare(other, undefined, { numeric: true }));
}

const costOf = (pools) => sum(pools.map((pool) => pool.total_cost_usd));

function Page({ state, children }) {
  const { data: bill, error } = state;
  const isEmpty = bill && bill.pools.length === 0 && Object.keys(bill.shares).length === 0;
  return h("div", { style: { padding: "16px", overflow: "auto" } },
    error && h("p", { role: "alert", style: { color: "#b85450" } }, `The cost could not be read: ${error}`),
    !bill && !error && h("p", null, "Reading the ledger …"),
    isEmpty && h("p", null, "The ledger has no machines for this. Is SKYWARD_LEDGER of the api-server that of the workers?"),
    bill && !isEmpty && children(bill));
}

// What each task pays of these pools: its calls on a pool that another task has opened, and the rest of its own.
function parts(pools) {
  const found = new Map();
  const add = (work, usd, pool) => {
    const name = `${work.task ?? ""}${work.task_run ? `[${work.task_run}]` : ""}`;
    const part = found.get(name) ?? { cost: 0, saved: 0, pools: new Set() };
    part.cost += usd;
    part.saved += pool.total_cost_usd ? (pool.saved_usd * usd) / pool.total_cost_usd : 0;
    part.pools.add(pool.pool_id);
    found.set(name, part);
  };
  for (const pool of pools) {
    const others = pool.users.filter((user) => user.cost_usd > 0 && user.work.run === pool.work.run
      && (user.work.task !== pool.work.task || user.work.task_run !== pool.work.task_run));
    others.forEach((user) => add(user.work, user.cost_usd, pool));
    add(pool.work, pool.total_cost_usd - sum(others.map((user) => user.cost_usd)), pool);
  }
  return [...found].sort(([one], [other]) => one.localeCompare(other, undefined, { numeric: true }));
}

function Shares({ shares }) {
  return h(Section, { title: "Shares of pools that other tasks or runs have opened" },
    h(Table, { head: ["Pool", "Cost of its calls"], rows: Object.entries(shares).map(([id, cost]) => [id, usd(cost)]) }));
}

const percent = (value) => (value === null || value === undefined ? "–" : `${value.toFixed(0)} %`);
const KINDS = [["accelerators", 1, "#3f9a6b"], ["processors", 2, "#5b8fc4"]];

// A line, or for one sample a point: a short line with round ends, because a line without length is not drawn.
function Line({ colour, at }) {
  const ends = at.length > 1 ? at : [[at[0][0] - 0.1, at[0][1]], [at[0][0] + 0.1, at[0][1]]];
  return h("polyline", { points: ends.map((one) => one.map((value) => value.toFixed(2)).join(",")).join(" "), fill: "none",
    stroke: colour, strokeWidth: at.length > 1 ? 2 : 8, strokeLinecap: "round", vectorEffect: "non-scaling-stroke" });
}

// The course of the utilisation, in percent of all nodes: a line for each kind that was measured.
function Course({ points }) {
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const x = (seconds) => (last > first ? (100 * (seconds - first)) / (last - first) : 50);
  const lines = KINDS.map(([name, place, colour]) => [name, colour, points.filter((point) => point[place] !== null)
    .map((point) => [x(point[0]), 30 - 0.3 * point[place]])]).filter(([, , at]) => at.length);
  const when = last > first ? `${time(first * 1000)} to ${time(last * 1000)}` : `at ${time(first * 1000)}`;
  return h(React.Fragment, null,
    h("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": "utilisation over time",
      style: { width: "100%", height: "90px", borderLeft: BORDER, borderBottom: BORDER } },
      lines.map(([name, colour, at]) => h(Line, { key: name, colour, at }))),
    h("div", { style: { fontSize: "0.8em", opacity: 0.8 } },
      `0 to 100 %, ${when}: `,
      lines.map(([name, colour]) => h("span", { key: name, style: { marginRight: "12px" } },
        h("span", { style: { color: colour } }, "■ "), name))));
}

function Live({ metrics }) {
  const { course = [], reported = {} } = metrics;
  const measured = course.some((point) => point[1] !== null || point[2] !== null);
  return h(React.Fragment, null,
    h(Section, { title: "Calls" }, h(Figures, { pairs: [
      ["Calls", metrics.calls ?? "–"], ["Done", metrics.calls_done ?? "–"], ["Failed", metrics.calls_failed ?? "–"],
      ["Accelerators (mean)", percent(metrics.gpu_percent_mean)], ["Processors (mean)", percent(metrics.cpu_percent_mean)],
      ...Object.entries(reported).map(([name, value]) => [name, String(value)])] })),
    measured && h(Section, { title: "Utilisation" }, h(Course, { points: course })));
}

// What has happened to the machines, oldest first.
function Events({ pools }) {
  const rows = pools.flatMap((pool) => pool.resources.flatMap((one) => [
    [one.intended_at, one, "requested"], [one.bound_at, one, "up"], [one.end_asked_at, one, "asked to end"],
    [one.gone_at, one, one.evidence ? `gone: ${one.evidence}` : "gone"]]));
  return h(Table, { head: ["Time", "Machine", "Event"], rows: rows.filter(([at]) => at)
    .sort(([one], [other]) => one.localeCompare(other)).map(([at, one, what]) => [time(at), one.cloud_id ?? one.name, what]) });
}

// Any task of the run can write these XComs: only pages of the web, and of this server, become links.
function Links({ links }) {
  const known = Object.entries(links).filter(([name, url]) => /^(https?:\/)?\//i.test(url ?? "") && name !== "Skyward");
  return h("div", { style: { display: "flex", gap: "16px", marginBottom: "10px" } }, known.map(([name, url]) =>
    h("a", { key: name, href: url, target: "_blank", rel: "noreferrer", style: { textDecoration: "underline" } }, name)));
}

function TaskTab({ dagId, runId, taskId, mapIndex }) {
  const query = { run_id: runId, task_id: taskId, map_index: mapIndex ?? -1 };
  const state = useAnswer(`skyward/dags/${encodeURIComponent(dagId)}/task`, query);
  const [dag, run, task] = [dagId, runId, taskId].map(encodeURIComponent);
  const instance = `api/v2/dags/${dag}/dagRuns/${run}/taskInstances/${task}`;
  const index = { map_index: mapIndex ?? -1 };
  const { data: stored } = useAnswer(`${instance}/state-store/skyward_metrics`, index);
  const { data: links } = useAnswer(`${instance}/links`, index);
  return h(Page, { state }, ({ pools, shares, used, cost_usd, saved_usd }) => h(React.Fragment, null,
    links && h(Links, { links: links.extra_links }),
    h(Figures, { pairs: [
      ["Cost of all tries", usd(cost_usd)], ["Saved by spot", usd(saved_usd)], ["Machines now", live(pools).length],
      ["Rate now", `${usd(sum(live(pools).map((one) => one.price_per_hour_usd)))} per hour`]] }),
    Object.keys(shares).length > 0 && h(Shares, { shares }),
    stored?.value && h(Live, { metrics: stored.value }),
    used.length > 0 && h(Uses, { used }),
    pools.length > 0 && h(OwnPools, { pools })));
}

// What a task has used of pools that others have opened: in the order of its tries.
function Uses({ used }) {
  const uses = used.flatMap((pool) => pool.users.map((user) => [pool, user]))
    .sort(([, one], [, other]) => (one.work.attempt ?? "").localeCompare(other.work.attempt ?? "", undefined, { numeric: true }));
  return h(React.Fragment, null,
    h(Section, { title: "Tries" }, h(Table, { head: ["Try", "Pool", "Slot time", "Cost of its calls"],
      rows: uses.map(([pool, user]) => [user.work.attempt ?? "", pool.name || pool.pool_id, duration(user.slot_seconds),
        usd(user.cost_usd)]) })),
    h(Section, { title: "Machines of these pools" }, h(Nodes, { pools: used })));
}

function OwnPools({ pools }) {
  return h(React.Fragment, null,
    h(Section, { title: "What the time was spent on" }, h(Buckets, { pools })),
    h(Section, { title: "Machines" }, h(Nodes, { pools })),
    h(Section, { title: "Tries" }, h(Table, { head: ["Try", "Pools", "Begun", "Ended", "Cost"],
      rows: groups(pools, (pool) => pool.work.attempt ?? "").map(([number, some]) => [
        number, some.map((pool) => pool.pool_id).join(", "), time(some[0].created_at), time(some.at(-1).ended_at),
        usd(costOf(some))]) })),
    h(Section, { title: "Events" }, h(Events, { pools })));
}

const share = (cost, limit) => (limit ? `${usd(limit)} (${((100 * cost) / limit).toFixed(0)} % used)` : "no limit");

// The most that these pools may cost together: by max_cost, or by max_lifetime and their prices.
function ceiling(pools) {
  const limits = pools.map((pool) => pool.ceiling_usd);
  return limits.length && !limits.includes(null) ? sum(limits) : null;
}

function RunTab({ dagId, runId }) {
  const state = useAnswer(`skyward/dags/${encodeURIComponent(dagId)}/run`, { run_id: runId });
  const task = (pool) => `${pool.work.task ?? ""}${pool.work.task_run ? `[${pool.work.task_run}]` : ""}`;
  return h(Page, { state }, ({ pools, shares, cost_usd, on_demand_usd, saved_usd }) => h(React.Fragment, null,
    h(Figures, { pairs: [
      ["Cost of the run", usd(cost_usd)], ["At on-demand prices", usd(on_demand_usd)], ["Saved by spot", usd(saved_usd)],
      ["Its pools cost at most", share(costOf(pools), ceiling(pools))], ["Machines now", live(pools).length]] }),
    h(Section, { title: "What the time was spent on" }, h(Buckets, { pools })),
    h(Section, { title: "Tasks" }, h(Table, { head: ["Task", "Pools", "Cost", "Saved"],
      rows: parts(pools).map(([name, part]) => [name, part.pools.size, usd(part.cost), usd(part.saved)]) })),
    Object.keys(shares).length > 0 && h(Shares, { shares }),
    h(Section, { title: "Pools" }, h(Table, { head: ["Pool", "Task", "Try", "Machines", "Begun", "Ended", "Cost", "At most"],
      rows: pools.map((pool) => [pool.pool_id, task(pool), pool.work.attempt ?? "", pool.resources.length,
        time(pool.created_at), time(pool.ended_at), usd(pool.total_cost_usd),
        share(pool.total_cost_usd, pool.ceiling_usd)]) }))));
}

// Airflow looks for the component by the name of the tab.
globalThis.Skyward = TaskTab;
globalThis.Cost = RunTab;

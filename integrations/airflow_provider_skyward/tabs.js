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

function useBill(path, query) {
  const [state, setState] = React.useState({ bill: null, error: "" });
  const url = new URL(`skyward/dags/${path}?${new URLSearchParams(query)}`, document.baseURI).href;
  React.useEffect(() => {
    let isShown = true;
    const load = async () => {
      try {
        const response = await fetch(url, { credentials: "same-origin" });
        const body = await response.json();
        if (!response.ok) throw new Error(typeof body.detail === "string" ? body.detail : `status ${response.status}`);
        if (isShown) setState({ bill: body, error: "" });
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
  const { bill, error } = state;
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

function TaskTab({ dagId, runId, taskId, mapIndex }) {
  const query = { run_id: runId, task_id: taskId, map_index: mapIndex ?? -1 };
  const state = useBill(`${encodeURIComponent(dagId)}/task`, query);
  return h(Page, { state }, ({ pools, shares, cost_usd, saved_usd }) => h(React.Fragment, null,
    h(Figures, { pairs: [
      ["Cost of all tries", usd(cost_usd)], ["Saved by spot", usd(saved_usd)], ["Machines now", live(pools).length],
      ["Rate now", `${usd(sum(live(pools).map((one) => one.price_per_hour_usd)))} per hour`]] }),
    Object.keys(shares).length > 0 && h(Shares, { shares }),
    h(Section, { title: "What the time was spent on" }, h(Buckets, { pools })),
    h(Section, { title: "Machines" }, h(Nodes, { pools })),
    h(Section, { title: "Tries" }, h(Table, { head: ["Try", "Pools", "Begun", "Ended", "Cost"],
      rows: groups(pools, (pool) => pool.work.attempt ?? "").map(([number, some]) => [
        number, some.map((pool) => pool.pool_id).join(", "), time(some[0].created_at), time(some.at(-1).ended_at),
        usd(costOf(some))]) }))));
}

function RunTab({ dagId, runId }) {
  const state = useBill(`${encodeURIComponent(dagId)}/run`, { run_id: runId });
  const task = (pool) => `${pool.work.task ?? ""}${pool.work.task_run ? `[${pool.work.task_run}]` : ""}`;
  return h(Page, { state }, ({ pools, shares, cost_usd, on_demand_usd, saved_usd }) => h(React.Fragment, null,
    h(Figures, { pairs: [
      ["Cost of the run", usd(cost_usd)], ["At on-demand prices", usd(on_demand_usd)], ["Saved by spot", usd(saved_usd)],
      ["Machines now", live(pools).length]] }),
    h(Section, { title: "What the time was spent on" }, h(Buckets, { pools })),
    h(Section, { title: "Tasks" }, h(Table, { head: ["Task", "Pools", "Cost", "Saved"],
      rows: parts(pools).map(([name, part]) => [name, part.pools.size, usd(part.cost), usd(part.saved)]) })),
    Object.keys(shares).length > 0 && h(Shares, { shares }),
    h(Section, { title: "Pools" }, h(Table, { head: ["Pool", "Task", "Try", "Machines", "Begun", "Ended", "Cost"],
      rows: pools.map((pool) => [pool.pool_id, task(pool), pool.work.attempt ?? "", pool.resources.length,
        time(pool.created_at), time(pool.ended_at), usd(pool.total_cost_usd)]) }))));
}

// Airflow looks for the component by the name of the tab.
globalThis.Skyward = TaskTab;
globalThis.Cost = RunTab;

// Fills the pages of the dashboard with what the server says, and asks it to stop a job.
// What comes as text is shown as text; HTML comes from the server alone, which has escaped it.
"use strict";
(() => {
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const names = [...document.querySelectorAll('meta[name="experiment"]')].map((meta) => meta.content);
  const form = document.querySelector('meta[name="form"]').content;
  const path = (name, rest) => "/api/experiments/" + encodeURIComponent(name) + rest;
  const query = () => names.map((name) => "e=" + encodeURIComponent(name)).join("&");
  const MOST_LINES = 1000;

  const element = (tag, text, look) => {
    const made = document.createElement(tag);
    if (text != null) made.textContent = text;
    if (look) made.className = look;
    return made;
  };
  const alive = (text) => { if (at("alive").textContent !== text) at("alive").textContent = text; };
  const number = (value) => (value == null ? "" : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4)));
  const large = (value) => (value == null ? "" : value >= 1e6 ? +(value / 1e6).toPrecision(3) + " M/s" : value >= 1e3 ? +(value / 1e3).toPrecision(3) + " k/s" : +value.toPrecision(3) + " /s");
  const time = (seconds) => {
    if (seconds == null) return "";
    const whole = Math.round(seconds);
    if (whole < 60) return whole + " s";
    if (whole < 3600) return Math.floor(whole / 60) + " min";
    if (whole < 86400) return Math.floor(whole / 3600) + " h " + String(Math.floor((whole % 3600) / 60)).padStart(2, "0") + " min";
    return Math.floor(whole / 86400) + " d " + Math.floor((whole % 86400) / 3600) + " h";
  };
  const clock = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" }) : "");

  // One connection for each page, and none while nobody sees it: a browser has six for a server.
  // A new one is told everything from the beginning: `opened` forgets what the last one said.
  const LOST = "Connection lost, retrying. If the dashboard was restarted, open its new address";
  function connect(url, hear, opened = () => {}) {
    let source = null, waiting = 0;
    const open = () => {
      const own = source = new EventSource(url());
      own.onopen = () => { opened(); alive("live"); };
      own.onerror = () => {
        alive(LOST);
        // A browser gives up where the server has answered with an error.
        if (own === source && own.readyState === 2) { close(); waiting = setTimeout(open, 3000); }
      };
      for (const [name, take] of Object.entries(hear)) own.addEventListener(name, (event) => take(JSON.parse(event.data)));
    };
    const close = () => { clearTimeout(waiting); if (source) source.close(); source = null; };
    document.addEventListener("visibilitychange", () => { close(); if (!document.hidden) open(); });
    open();
    return () => { close(); open(); };
  }

  // -- the list ------------------------------------------------------------------------------

  const chosen = new Set();
  let rows = [];
  function showList() {
    const word = at("filter").value.toLowerCase();
    const shown = rows.filter((row) => (row.name + " " + row.state).toLowerCase().includes(word));
    const focused = document.activeElement && document.activeElement.dataset.name;
    at("list").tBodies[0].replaceChildren(...shown.map(listRow));
    if (focused) for (const box of at("list").querySelectorAll("input")) if (box.dataset.name === focused) box.focus();
    at("nothing").hidden = rows.length > 0;
    at("compare").disabled = chosen.size < 2 || chosen.size > 8;
    root.dataset.rows = shown.length;
  }
  function listRow(row) {
    const made = element("tr");
    const cell = (text, label, look) => {
      const own = element("td", text, look);
      if (label) own.dataset.label = label;
      made.append(own);
      return own;
    };
    const box = element("input");
    box.type = "checkbox";
    box.dataset.name = row.name;
    box.checked = chosen.has(row.name);
    box.setAttribute("aria-label", "choose " + row.name);
    box.onchange = () => {
      if (box.checked) chosen.add(row.name); else chosen.delete(row.name);
      at("compare").disabled = chosen.size < 2 || chosen.size > 8;
    };
    cell().append(box);
    const link = element("a", row.name);
    link.href = "/experiment/" + encodeURIComponent(row.name);
    const name = cell(null, "", "name");
    name.append(link);
    if (row.cause) name.append(element("div", row.cause, "why"));
    const state = row.state + (row.attempt > 1 ? ", attempt " + row.attempt : "");
    cell(state, "", "state state-" + row.state.replace(/[^a-z]/g, ""));
    const whose = row.trainer > 1 ? " (Trainer " + row.trainer + ")" : "";
    cell(row.step == null ? "" : row.step + (row.steps ? " of " + row.steps : "") + whose, "step", "number");
    cell(row.lost ? "NaN" : number(row.loss), "loss", row.lost ? "number state-failed" : "number");
    cell(large(row.rate), "speed", "number");
    cell(row.ended ? "" : time(row.left), "left", "number");
    cell(row.training == null ? "" : Math.round(row.training * 100) + " %", "training", "number");
    const each = row.ranks / row.nodes;
    cell(!row.nodes ? "" : Number.isInteger(each) ? row.nodes + " x " + each : row.nodes + ", " + row.ranks + " ranks", "nodes", "number");
    cell(row.ended ? "" : row.slowest, "slowest");
    cell(clock(row.started) + (row.ended ? ", " + time(row.ended - row.started) : ""), "started");
    return made;
  }
  function list() {
    connect(() => "/api/events", { list: (fresh) => { rows = fresh.experiments; alive("live"); showList(); }, problem: alive });
    at("filter").oninput = showList;
    at("choose").onsubmit = (event) => {
      event.preventDefault();
      if (at("compare").disabled) return;
      location.href = "/compare?" + [...chosen].map((name) => "e=" + encodeURIComponent(name)).join("&");
    };
  }

  // -- one experiment, or several ------------------------------------------------------------

  // Replace HTML of the server's only where it differs, and leave open what the user has opened.
  const before = {};
  function fill(id, html) {
    if (before[id] === html) return false;
    const open = [...at(id).querySelectorAll("details")].map((details) => details.open);
    before[id] = html;
    at(id).innerHTML = html;
    at(id).querySelectorAll("details").forEach((details, i) => { details.open = Boolean(open[i]); });
    return true;
  }
  let busy = false, again = false;
  async function refresh() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      const answer = await fetch("/api/page?" + query());
      const parts = await answer.json();
      if (!answer.ok) { before.drawn = null; at("drawn").replaceChildren(element("p", parts.error, "cause")); return; }
      const maps = [...document.querySelectorAll("#drawn select")].map((select) => select.selectedIndex);
      fill("heading", parts.heading);
      fill("drawn", parts.drawn);
      document.querySelectorAll("#drawn select").forEach((select, i) => { select.selectedIndex = maps[i] || 0; });
      fill("details", parts.details);
      if (at("stop")) at("stop").hidden = parts.over;
      drawReport(parts.data);
    } catch (error) {
      alive("not connected: trying again");
    } finally {
      busy = false;
      if (again) { again = false; refresh(); }
    }
  }

  function showLines(fresh) {
    const log = at("log");
    const end = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (fresh.left_out) log.append(element("b", "... " + fresh.left_out + " lines skipped (all are in the log file)\n"));
    const more = document.createDocumentFragment();
    for (const [rank, line] of fresh.lines) {
      const one = element("span");
      one.append(element("b", rank === "-" ? "" : "rank " + rank + " | "), line + "\n");
      more.append(one);
    }
    log.append(more);
    while (log.childElementCount > MOST_LINES) log.firstElementChild.remove();
    if (end) log.scrollTop = log.scrollHeight;
  }

  async function search(event) {
    event.preventDefault();
    const word = at("word").value;
    at("hits").hidden = true;
    if (!word.trim()) { at("found").textContent = ""; return; }
    at("found").textContent = "searching ...";
    let answer, found;
    try {
      answer = await fetch(path(names[0], "/search?q=" + encodeURIComponent(word)));
      found = await answer.json();
    } catch (error) {  // the dashboard has ended, or was started anew and answers with no JSON
      found = { error: "not searched: " + LOST };
    }
    if (found.error) { at("found").textContent = found.error; return; }
    const lines = found.count === 1 ? "1 line" : found.count + " lines";
    const shown = found.count > found.hits.length ? "; the last of each node are shown" : "";
    const part = found.whole ? "" : "; not all was read in " + found.seconds + " s";
    const unread = found.unread ? "; not read: " + found.unread : "";
    at("found").textContent = lines + shown + part + unread;
    at("hits").replaceChildren(...found.hits.map((hit) => {
      const rank = hit.rank === "-" || hit.rank === "~" ? "" : " rank " + hit.rank;
      const one = element("li");
      one.append(element("span", "node " + hit.node + rank + " | ", "soft"), hit.line);
      return one;
    }));
    at("hits").hidden = !found.hits.length;
    root.dataset.hits = found.hits.length;
  }

  async function stop() {
    try {
      const answer = await fetch(path(names[0], "/stop"), { method: "POST", headers: { "X-Orchestrator-Form": form } });
      if (!answer.ok) stopping((await answer.json()).error);
    } catch (error) {
      stopping("nothing was asked to stop: " + LOST);
    }
  }
  function stopping(said) {
    at("stopping").hidden = !said;
    at("stopping").textContent = said;
  }

  function experiment() {
    const hear = { page: refresh, stopping, lines: showLines };
    const events = () => path(names[0], "/events" + (at("node").value ? "?node=" + at("node").value : ""));
    const reconnect = connect(events, hear, () => at("log").replaceChildren());
    at("node").onchange = reconnect;
    at("search").onsubmit = search;
    at("stop").onclick = () => at("ask").showModal();
    at("ask").onclose = () => { if (at("ask").returnValue === "stop") stop(); at("ask").returnValue = ""; };
    refresh();
  }
  function compare() {
    connect(() => "/api/events?" + query(), { page: refresh });
    refresh();
  }
  ({ list, experiment, compare })[root.dataset.kind]();
})();

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
  const large = (value, unit) => (value == null ? "" : value >= 1e6 ? +(value / 1e6).toPrecision(3) + "M" : value >= 1e3 ? +(value / 1e3).toPrecision(3) + "k" : String(+value.toPrecision(3))) + (value == null ? "" : " " + unit + "/s");
  // As common/text.py writes whole seconds.
  const time = (seconds) => {
    if (seconds == null) return "";
    const whole = Math.round(seconds);
    const two = (large, unit, small, rest) => Math.floor(whole / large) + " " + unit + " " + String(Math.floor((whole % large) / small)).padStart(2, "0") + " " + rest;
    return whole < 60 ? whole + " s" : whole < 3600 ? two(60, "min", 1, "s") : whole < 86400 ? two(3600, "h", 60, "min") : two(86400, "d", 3600, "h");
  };
  const clock = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false }) : "");

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

  // What a reader has chosen stays in this browser.
  const kept = (() => { try { return JSON.parse(localStorage.getItem("list")) || {}; } catch (error) { return {}; } })();
  const choice = { sort: "started", down: true, group: "", columns: null, hidden: [], ...kept };
  const remember = () => { try { localStorage.setItem("list", JSON.stringify(choice)); } catch (error) { /* private windows keep nothing */ } };

  const each = (row) => (row.nodes ? row.ranks / row.nodes : 0);
  const numeric = (text) => (text != null && text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text);
  // A column: its heading, what it is sorted by, its words, and its look.
  const COLUMNS = {
    state: { by: (row) => row.state, text: (row) => row.state + (row.attempt > 1 ? ", attempt " + row.attempt : ""), look: (row) => "state state-" + row.state.replace(/[^a-z]/g, "") },
    step: { by: (row) => row.step, text: (row) => (row.step == null ? "" : row.step + (row.steps ? " of " + row.steps : "") + (row.trainer > 1 ? " (Trainer " + row.trainer + ")" : "")), look: () => "number", label: "step" },
    loss: { by: (row) => row.loss, text: (row) => (row.lost ? "NaN" : number(row.loss)), look: (row) => (row.lost ? "number state-failed" : "number"), label: "loss" },
    speed: { by: (row) => row.rate, text: (row) => large(row.rate, row.unit), look: () => "number", label: "speed" },
    left: { by: (row) => (row.ended ? null : row.left), text: (row) => (row.ended ? "" : time(row.left)), look: () => "number", label: "left" },
    training: { by: (row) => row.training, text: (row) => (row.training == null ? "" : Math.round(row.training * 100) + " %"), look: () => "number", label: "training" },
    "nodes x ranks": { by: (row) => row.ranks, text: (row) => (!row.nodes ? "" : Number.isInteger(each(row)) ? row.nodes + " x " + each(row) : row.nodes + ", " + row.ranks + " ranks"), look: () => "number", label: "nodes" },
    slowest: { by: (row) => (row.ended ? "" : row.slowest), text: (row) => (row.ended ? "" : row.slowest), look: () => "", label: "slowest" },
    tags: { by: (row) => row.tags.join(" "), text: (row) => row.tags.join(" "), look: () => "tags", label: "tags" },
    started: { by: (row) => row.started, text: (row) => clock(row.started) + (row.ended ? ", " + time(row.ended - row.started) : ""), look: () => "", label: "started" },
  };
  // Numbers as they were typed, but for those that a computer wrote with all their digits.
  const brief = (text = "") => (text.length > 10 && typeof numeric(text) === "number" ? String(+Number(text).toPrecision(6)) : text);
  const setting = (name) => ({ by: (row) => numeric(row.settings[name]), text: (row) => brief(row.settings[name]), look: () => "setting", label: name });
  const column = (name) => COLUMNS[name] || setting(name);
  const FEW = 4;  // settings that are shown until somebody chooses

  const chosen = new Set();
  let rows = [];
  const settings = () => [...new Set(rows.flatMap((row) => Object.keys(row.settings)))];
  function columns() {
    const known = [...Object.keys(COLUMNS), ...settings()];
    const wanted = choice.columns || [...Object.keys(COLUMNS).filter((name) => rows.some((row) => COLUMNS[name].text(row))), ...settings().slice(0, FEW)];
    return known.filter((name) => wanted.includes(name) && !dropped.includes(name));
  }
  // Columns for which a screen has no room, until somebody chooses columns.
  let dropped = [];
  const expendable = () => [...settings().reverse(), "training", "slowest", "nodes x ranks", "speed", "tags"];
  function fits() {
    const place = at("list").parentElement;
    return choice.columns || place.scrollWidth <= place.clientWidth;
  }
  function compared(one, other) {
    const [a, b] = [one, other].map((row) => (choice.sort === "experiment" ? row.name : column(choice.sort).by(row)));
    const missing = (value) => value == null || value === "";
    if (missing(a) || missing(b)) return missing(a) - missing(b);  // what nobody knows comes last
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
    return choice.down ? -order : order;
  }
  const groups = { "": () => "", state: (row) => row.state, tag: (row) => row.tags[0] || "no tag", name: (row) => row.name.replace(/_\d{8}_\d{6}.*$/, "") };
  const group_of = (row) => (groups[choice.group] || ((one) => one.settings[choice.group] ?? "-"))(row);

  function showList() {
    const word = at("filter").value.toLowerCase();
    const text = (row) => [row.name, row.state, row.note, ...row.tags, ...Object.entries(row.settings).map((pair) => pair.join("="))].join(" ").toLowerCase();
    const found = rows.filter((row) => text(row).includes(word));
    const shown = found.filter((row) => !choice.hidden.includes(row.name)).sort(compared);
    const focused = document.activeElement && document.activeElement.dataset.name;
    draw(shown);
    for (const name of expendable()) {
      if (fits()) break;
      if (!columns().includes(name)) continue;
      dropped.push(name);
      draw(shown);
    }
    if (focused) for (const one of at("list").querySelectorAll("[data-name]")) if (one.dataset.name === focused) one.focus();
    at("nothing").hidden = rows.length > 0;
    const hidden = rows.filter((row) => choice.hidden.includes(row.name)).length;
    at("unhide").hidden = !hidden;
    at("unhide").textContent = "Show " + hidden + " hidden";
    menus();
    selected();
    root.dataset.rows = shown.length;
  }
  function draw(shown) {
    const names = columns();
    heading(names);
    const made = [];
    const together = new Map();
    for (const row of shown) together.set(group_of(row), [...(together.get(group_of(row)) || []), row]);
    for (const [title, members] of together) {
      if (choice.group) made.push(groupRow(title, members, names.length + 2));
      made.push(...members.map((row) => listRow(row, names)));
    }
    at("list").tBodies[0].replaceChildren(...made);
  }
  function selected() {
    at("compare").disabled = chosen.size < 2 || chosen.size > 8;
    at("hide").disabled = !chosen.size;
    at("chosen").textContent = chosen.size ? chosen.size + " chosen" : "choose 2 to 8 to compare";
  }
  function heading(names) {
    const head = element("tr");
    const corner = element("th");
    corner.append(element("span", "choose", "hidden"));
    head.append(corner);
    for (const name of ["experiment", ...names]) {
      const cell = element("th", null, name !== "experiment" && column(name).look({ state: "" }) === "number" ? "number" : "");
      const button = element("button", name.replace(" x ", "\u00a0x ").replaceAll(".", ".\u200b"));
      button.type = "button";
      button.dataset.name = "sort " + name;
      if (choice.sort === name) {
        cell.setAttribute("aria-sort", choice.down ? "descending" : "ascending");
        button.append(element("span", choice.down ? " \u2193" : " \u2191"));
      }
      button.onclick = () => {
        if (choice.sort === name) choice.down = !choice.down;
        else Object.assign(choice, { sort: name, down: name !== "experiment" && name !== "loss" && name !== "state" });
        remember();
        showList();
      };
      cell.scope = "col";
      cell.append(button);
      head.append(cell);
    }
    at("list").tHead.replaceChildren(head);
  }
  function menus() {
    const options = [["", "nothing"], ["state", "state"], ["name", "name"], ["tag", "tag"], ...settings().map((name) => [name, name])];
    if (at("group").options.length !== options.length) {
      at("group").replaceChildren(...options.map(([value, words]) => new Option(words, value)));
    }
    at("group").value = choice.group;
    const place = at("columns").querySelector("div");
    const known = [...Object.keys(COLUMNS), ...settings()];
    if (place.childElementCount === known.length) {
      place.querySelectorAll("input").forEach((box, at) => { box.checked = columns().includes(known[at]); });
      return;
    }
    place.replaceChildren(...known.map((name) => {
      const label = element("label"), box = element("input");
      box.type = "checkbox";
      box.checked = columns().includes(name);
      box.onchange = () => {
        const before = columns();
        dropped = [];
        choice.columns = box.checked ? [...before, name] : before.filter((one) => one !== name);
        remember();
        showList();
      };
      label.append(box, " " + name);
      return label;
    }));
  }
  function groupRow(title, members, width) {
    const made = element("tr", null, "group"), cell = element("th", (title || "-") + " (" + members.length + ")");
    cell.colSpan = width;
    cell.scope = "rowgroup";
    made.append(cell);
    return made;
  }
  function listRow(row, names) {
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
      selected();
    };
    cell().append(box);
    const link = element("a", row.name);
    link.href = "/experiment/" + encodeURIComponent(row.name);
    const name = cell(null, "", "name");
    name.append(link);
    if (row.note) name.append(element("div", row.note, "note"));
    if (row.cause) name.append(element("div", row.cause, "why"));
    for (const each of names) {
      const { text, look, label } = column(each);
      cell(text(row), label, look(row));
    }
    return made;
  }
  function list() {
    connect(() => "/api/events", { list: (fresh) => { rows = fresh.experiments; alive("live"); showList(); }, problem: alive });
    addEventListener("resize", () => { dropped = []; showList(); });
    at("filter").oninput = showList;
    at("group").onchange = () => { choice.group = at("group").value; remember(); showList(); };
    at("hide").onclick = () => { choice.hidden = [...new Set([...choice.hidden, ...chosen])]; chosen.clear(); remember(); showList(); };
    at("unhide").onclick = () => { choice.hidden = []; remember(); showList(); };
    at("choose").onsubmit = (event) => {
      event.preventDefault();
      if (at("compare").disabled) return;
      location.href = "/compare?" + [...chosen].map((name) => "e=" + encodeURIComponent(name)).join("&");
    };
  }

  // -- the cluster ---------------------------------------------------------------------------

  const opened = new Set();
  let cluster_now = null;
  function cells(row, headings) {
    const made = element("tr");
    row.forEach(([text, look], i) => {
      const cell = element("td", text, look);
      if (i) cell.dataset.label = headings[i].toLowerCase();
      made.append(cell);
    });
    return made;
  }
  function head(id, headings) {
    if (at(id).tHead.rows[0].childElementCount === headings.length) return;
    at(id).tHead.rows[0].replaceChildren(...headings.map((name) => {
      const cell = element("th", name);
      cell.scope = "col";
      return cell;
    }));
  }
  function details(node, fresh, width) {
    const made = element("tr", null, "more"), cell = element("td");
    cell.colSpan = width;
    const list = element("ul");
    for (const one of node.health) list.append(element("li", one.what + (one.fix ? " \u2192 " + one.fix : ""), one.look));
    const when = node.looked ? "The doctor looked " + clock(node.looked) + (node.health.length ? "." : ": all is well.") : "The doctor has not looked yet: orchestrator doctor.";
    cell.append(list, element("p", when, "soft"));
    if (node.parts.length) {
      const table = element("table"), heading = element("tr");
      for (const name of fresh.parts) { const th = element("th", name); th.scope = "col"; heading.append(th); }
      table.createTHead().append(heading);
      const body = table.createTBody();
      node.parts.forEach((part) => body.append(cells(part, fresh.parts)));
      const scroll = element("div", null, "scroll");
      scroll.append(table);
      cell.append(scroll);
    }
    made.append(cell);
    return made;
  }
  function nodeRows(node, fresh) {
    const { headings } = fresh.nodes, made = cells(node.cells, headings);
    const name = made.firstElementChild, button = element("button", node.name);
    name.className = "name";
    made.children[1].classList.add("health");
    made.children[1].classList.toggle("long", made.children[1].textContent.length > 20);
    button.type = "button";
    button.dataset.name = node.name;
    button.setAttribute("aria-expanded", opened.has(node.name));
    button.onclick = () => {
      if (!opened.delete(node.name)) opened.add(node.name);
      showCluster(cluster_now);
    };
    name.replaceChildren(button);
    return opened.has(node.name) ? [made, details(node, fresh, headings.length)] : [made];
  }
  function mark(one) {
    const made = element("span", one.sick ? "!" : one.share == null ? "?" : "", "mark-use" + (one.sick ? " bad" : one.share == null ? " warn" : ""));
    if (one.share != null) made.style.setProperty("--use", Math.round(100 * one.share) + "%");
    made.setAttribute("aria-hidden", "true");
    return made;
  }
  function heat(node) {
    const made = element("li"), marks = element("span", null, "marks");
    marks.append(...node.marks.map(mark));
    const known = node.marks.filter((one) => one.share != null);
    const mean = known.length ? Math.round((100 * known.reduce((sum, one) => sum + one.share, 0)) / known.length) + " %" : "not known";
    made.append(marks, element("span", node.name), element("span", mean, "soft"));
    return made;
  }
  function showCluster(fresh) {
    cluster_now = fresh;
    alive("live");
    const focused = document.activeElement && document.activeElement.dataset.name;
    at("summary").textContent = fresh.summary;
    at("problems").hidden = !fresh.problems.length;
    at("problems").replaceChildren(...fresh.problems.map((text) => element("li", text)));
    at("legend").textContent = "A bar for each " + (fresh.gpus ? "GPU" : "node's processors") + ": its height is its use. ! is sick, ? has not answered.";
    at("heat").replaceChildren(...fresh.nodes.rows.map(heat));
    head("nodes", fresh.nodes.headings);
    at("nodes").tBodies[0].replaceChildren(...fresh.nodes.rows.flatMap((node) => nodeRows(node, fresh)));
    head("jobs", fresh.jobs.headings);
    at("jobs").tBodies[0].replaceChildren(...fresh.jobs.rows.map((job) => {
      const made = cells(job.cells, fresh.jobs.headings);
      made.firstElementChild.className = "name";
      if (job.experiment) {
        const link = element("a", job.experiment);
        link.href = "/experiment/" + encodeURIComponent(job.experiment);
        made.firstElementChild.replaceChildren(link);
      }
      return made;
    }));
    at("nothing").hidden = fresh.jobs.rows.length > 0;
    if (focused) for (const one of document.querySelectorAll("#nodes [data-name]")) if (one.dataset.name === focused) one.focus();
    root.dataset.nodes = fresh.nodes.rows.length;
  }
  function cluster() {
    connect(() => "/api/cluster/events", { cluster: showCluster, problem: alive });
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
  // The log of the node where a failure began, unless the reader has chosen one.
  let cause = null;
  function lookAt(node) {
    const select = at("node");
    if (!select || node == null || select.dataset.chosen || select.value === String(node)) return;
    select.value = String(node);
    if (select.value === String(node)) select.dispatchEvent(new Event("change"));
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
      if (parts.cause !== cause) lookAt(cause = parts.cause);
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
    at("node").onchange = (event) => { if (event.isTrusted) at("node").dataset.chosen = "yes"; reconnect(); };
    at("search").onsubmit = search;
    at("stop").onclick = () => at("ask").showModal();
    at("ask").onclose = () => { if (at("ask").returnValue === "stop") stop(); at("ask").returnValue = ""; };
    refresh();
  }
  function compare() {
    connect(() => "/api/events?" + query(), { page: refresh });
    refresh();
  }
  ({ list, cluster, experiment, compare })[root.dataset.kind]();
})();

// Keeps a page of the dashboard fresh: asks for it again, and replaces the parts that differ.
// The HTML comes from the server alone, which has escaped it.
"use strict";
(() => {
  const LOOK_MS = 3000;
  const at = (id) => document.getElementById(id);
  const shown = {};  // of each part, the server's HTML: the page's own script changes it later
  for (const part of document.querySelectorAll("[data-part]")) shown[part.id] = part.innerHTML;

  // Replace a part, and leave open and chosen what the reader has opened and chosen.
  function fill(part, html) {
    if (shown[part.id] === html) return;
    shown[part.id] = html;
    const open = [...part.querySelectorAll("details")].map((details) => details.open);
    const chosen = [...part.querySelectorAll("select")].map((select) => select.selectedIndex);
    const checked = new Set([...part.querySelectorAll("input:checked")].map((box) => box.value));
    part.innerHTML = html;
    part.querySelectorAll("details").forEach((details, i) => { if (i in open) details.open = open[i]; });
    part.querySelectorAll("select").forEach((select, i) => { select.selectedIndex = chosen[i] || 0; });
    part.querySelectorAll("input[type=checkbox]").forEach((box) => { box.checked = checked.has(box.value); });
  }

  let version = "";
  async function refresh() {
    let words = "live";
    try {
      const answer = await fetch(location.href, { headers: { "If-None-Match": version } });
      if (answer.ok) {
        version = answer.headers.get("ETag");
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of document.querySelectorAll("[data-part]")) fill(part, fresh.getElementById(part.id).innerHTML);
        arrange();
        drawReport(JSON.parse(fresh.getElementById("data").textContent));
      } else if (answer.status !== 304) words = await answer.text();
    } catch (error) {
      words = "Connection lost, retrying. If the dashboard was restarted, open its new address";
    }
    if (at("alive").textContent !== words) at("alive").textContent = words;
    document.documentElement.dataset.looks = Number(document.documentElement.dataset.looks || 0) + 1;
    setTimeout(look, LOOK_MS);
  }
  const look = () => { if (document.hidden) document.addEventListener("visibilitychange", look, { once: true }); else refresh(); };

  // -- the list: what the reader has typed and clicked --------------------------------------------

  let column = 0, down = false;
  const value = (row) => { const cell = row.cells[column]; return cell.dataset.value ?? cell.textContent; };
  function compared(one, other) {
    const [a, b] = [value(one), value(other)];
    if (!a || a === "None" || !b || b === "None") return (!a || a === "None") - (!b || b === "None");
    const order = a.localeCompare(b, undefined, { numeric: true });
    const numbers = a - b;
    return (down ? -1 : 1) * (Number.isNaN(numbers) ? order : numbers);
  }
  function arrange() {
    if (!at("list")) return;
    const body = at("list").querySelector("tbody"), word = at("filter").value.toLowerCase();
    if (column) body.append(...[...body.rows].sort(compared));
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(word);
    document.documentElement.dataset.rows = body.querySelectorAll("tr:not([hidden])").length;
    at("list").querySelectorAll("th").forEach((head, i) => {
      if (i && i === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }
  if (at("list")) {
    at("filter").oninput = arrange;
    at("list").addEventListener("click", (event) => {
      const head = event.target.closest("th");
      if (!head) return;
      [column, down] = [head.cellIndex, column === head.cellIndex && !down];
      arrange();
    });
    arrange();
  }
  look();
})();

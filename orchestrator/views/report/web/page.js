// Draws the charts from the JSON in the page, and again from what drawReport()
// is given. Nothing is fetched.
"use strict";
(() => {
  let data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const faint = (name) => color(name) + "40";

  const UNITS = {
    bytes: [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"]],
    ms: [[6e4, " min"], [1e3, " s"]],
    "B/s": [[1e12, " TB/s"], [1e9, " GB/s"], [1e6, " MB/s"], [1e3, " kB/s"]],
    "/s": [[1e9, " G/s"], [1e6, " M/s"], [1e3, " k/s"]],
    "": [[1e9, " G"], [1e6, " M"]],
  };
  function show(value, unit, digits = 3) {
    if (value == null) return "-";
    if (unit === "ratio") return +(value * 100).toPrecision(digits) + " %";
    if (!unit && Math.abs(value) >= 1e12) return value.toExponential(2);
    for (const [size, name] of UNITS[unit] || []) {
      if (Math.abs(value) >= size) return +(value / size).toPrecision(digits) + name;
    }
    const small = value !== 0 && Math.abs(value) < 1e-3;
    const plain = small ? value.toExponential(2) : String(+value.toPrecision(digits + 1));
    return plain + (unit === "bytes" ? " B" : unit && " " + unit);
  }
  // The words of an axis, with as many digits as tell one from the next.
  function told(ticks, unit) {
    const known = ticks.filter((tick) => tick != null);
    let digits = 3;
    while (digits < 9 && new Set(known.map((tick) => show(tick, unit, digits))).size < known.length) digits += 1;
    return ticks.map((tick) => (tick == null ? "" : show(tick, unit, digits)));
  }

  // A time since the start of the job.
  function clock(seconds) {
    if (seconds == null) return "-";
    const two = (number) => String(Math.floor(number)).padStart(2, "0");
    const [days, rest] = [Math.floor(seconds / 86400), seconds % 86400];
    const hours = days || rest >= 3600 ? Math.floor(rest / 3600) + ":" : "";
    return (days ? days + " d " : "") + hours + two((rest % 3600) / 60) + ":" + two(rest % 60);
  }

  // How the curves of the training are shown: all charts alike.
  const view = { over: "step", smooth: 0, log: false };

  // Where a step lies on another axis: on the line through the points that are known.
  function placed(steps, [known, values]) {
    let at = 1;
    return steps.map((step) => {
      while (at < known.length - 1 && known[at] < step) at += 1;
      const share = (step - known[at - 1]) / (known[at] - known[at - 1]);
      return values[at - 1] + share * (values[at] - values[at - 1]);
    });
  }
  const axis_of = (run) => (view.over === "time" && (data.axes[run] || []).length ? data.axes[run] : null);
  function places(chart, line) {
    if (chart.over !== "steps" || view.over === "step") return line.steps;
    const axis = axis_of(line.run);
    return axis ? placed(line.steps, axis) : [];
  }

  // The exponential mean of what came before, as if nothing had come before the first value.
  function smoothed(values) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = sum * view.smooth + value;
      weight = weight * view.smooth + 1;
      return sum / weight;
    });
  }
  const is_smooth = (chart) => view.smooth > 0 && chart.over === "steps" && !chart.stacked;

  // Put several lines, each with steps of its own, over one axis.
  function joined(chart) {
    return uPlot.join(chart.lines.map((line) => {
      const steps = places(chart, line);
      const cut = (values) => (steps.length ? values : []);
      if (is_smooth(chart)) return [steps, cut(line.means), cut(smoothed(line.means))];
      const columns = [steps, cut(line.means)];
      if (line.lows) columns.push(cut(line.lows), cut(line.highs));
      return columns;
    }));
  }

  function stacked(chart) {
    const lines = chart.lines, sums = lines[0].means.map(() => 0);
    const steps = places(chart, lines[0]);
    if (!steps.length) return [[], ...lines.map(() => [])];
    return [steps, ...lines.map((line) => line.means.map((value, i) => (sums[i] += value ?? 0)))];
  }

  const STEPS = [1, 10, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15].flatMap((power) => [power, 2 * power, 5 * power]);
  const SPLITS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  function axes(unit, timed) {
    const look = { stroke: color("soft"), grid: { stroke: color("rule"), width: 1 }, ticks: { stroke: color("rule") } };
    return [
      timed
        ? { ...look, size: 34, incrs: SPLITS, space: 70, values: (_, ticks) => ticks.map(clock) }
        : { ...look, size: 34, incrs: STEPS, values: (_, ticks) => ticks.map((tick) => show(tick, "")) },
      { ...look, size: unit === "B/s" ? 84 : 70, values: (_, ticks) => told(ticks, unit) },
    ];
  }

  const over_of = (chart) => (chart.over === "steps" ? view.over : chart.over);
  const over_time = (chart) => over_of(chart) === "time";

  // Small marks below the curve where something happened.
  function where(mark, chart) {
    if (over_time(chart)) return mark.seconds;
    return mark.step;
  }
  function marks(known, words) {
    const each = (plot, use) => {
      for (const mark of data.marks || []) {
        const at = where(mark, known());
        if (at != null && at >= plot.scales.x.min && at <= plot.scales.x.max) use(mark, plot.valToPos(at, "x", true));
      }
    };
    const draw = (plot) => {
      const { top, height } = plot.bbox;
      plot.ctx.save();
      each(plot, (mark, x) => {
        plot.ctx.fillStyle = color(mark.bad ? "bad" : "soft");
        const high = (mark.bad ? 14 : 8) * devicePixelRatio;
        plot.ctx.fillRect(x - devicePixelRatio, top + height - high, 2 * devicePixelRatio, high);
      });
      plot.ctx.restore();
    };
    const name = (plot) => {
      const cursor = plot.cursor.left * devicePixelRatio + plot.bbox.left;
      let nearest = null, distance = 6 * devicePixelRatio;
      if (plot.cursor.left >= 0) each(plot, (mark, x) => { if (Math.abs(x - cursor) <= distance) { nearest = mark; distance = Math.abs(x - cursor); } });
      words.textContent = nearest ? nearest.words : "";
    };
    return { hooks: { draw, setCursor: name } };
  }

  // A key to each line: at rest its last value and its best, else the value under the cursor.
  function key(chart, place, plot_of, lines_of) {
    const list = document.createElement("ul");
    list.className = "key";
    const rows = chart.lines.map((line, i) => {
      const row = document.createElement("button");
      row.type = "button";
      row.setAttribute("aria-pressed", "true");
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of Object.entries({ width: 26, height: 8 })) svg.setAttribute(name, value);
      for (const [name, value] of Object.entries({ x1: 0, x2: 26, y1: 4, y2: 4, "stroke-width": 3, "stroke-dasharray": DASHES[line.dash % 4].join(" ") })) stroke.setAttribute(name, value);
      stroke.style.stroke = `var(--line-${line.color % 8})`;
      svg.setAttribute("aria-hidden", "true");
      svg.append(stroke);
      const name = document.createElement("span"), value = document.createElement("span");
      name.textContent = line.name;
      value.className = "value";
      row.append(svg, name, value);
      row.onclick = () => {
        const shown = row.getAttribute("aria-pressed") === "true";
        row.setAttribute("aria-pressed", String(!shown));
        for (const at of lines_of(i)) plot_of().setSeries(at, { show: !shown });
      };
      const item = document.createElement("li");
      item.append(row);
      list.append(item);
      return value;
    });
    const where = document.createElement("li");
    where.className = "at";
    list.append(where);
    place.append(list);
    const over = over_of(chart);
    const rest = (line) => {
      const words = ["last " + show(line.means.at(-1), chart.unit)];
      for (const [which, value] of Object.entries(line.best)) words.push(which + " " + show(value, chart.unit));
      return words.join(", ");
    };
    const at_rest = (fresh) => { chart = fresh; where.textContent = ""; chart.lines.forEach((line, i) => { rows[i].textContent = rest(line); }); };
    at_rest(chart);
    const at_cursor = (plot) => {
      const at = plot.cursor.idx;
      if (at == null || plot.cursor.left < 0) { at_rest(chart); return; }
      const x = plot.data[0][at];
      where.textContent = over === "time" ? "after " + clock(x) : "step " + x;
      chart.lines.forEach((line, i) => {
        let here = at;
        const series = plot.data[lines_of(i)[0]];
        while (here > 0 && series[here] == null) here -= 1;  // other lines have points between
        rows[i].textContent = show(chart.stacked ? line.means[here] : series[here], chart.unit);
      });
    };
    return { at_rest, at_cursor };
  }

  const DASHES = [[], [8, 4], [2, 3], [9, 3, 2, 3]];
  function draw(chart, place) {
    place.replaceChildren();
    const picture = document.createElement("div"), words = document.createElement("p");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", chart.words);
    words.className = "mark";
    const over = over_of(chart), timed = over === "time";
    const series = [{ label: over }];
    const bands = [];
    const first = [];  // of each line, the series that have its look
    chart.lines.forEach((line) => {
      const name = "line-" + (line.color % 8), at = series.length;
      const look = { stroke: color(name), dash: DASHES[line.dash % 4], width: 1.7, spanGaps: true, points: { show: line.dots || line.steps.length < 3 }, paths: line.stair ? uPlot.paths.stepped({ align: 1 }) : line.dots ? () => null : undefined };
      if (chart.stacked) {
        series.push({ stroke: color(name), fill: faint(name), points: { show: false } });
        if (at > 1) bands.push({ series: [at, at - 1] });
        first.push([at]);
      } else if (is_smooth(chart)) {
        series.push({ ...look, stroke: faint(name), width: 1 }, look);
        first.push([at + 1, at]);
      } else {
        series.push(look);
        first.push([at]);
        if (line.lows) {
          const edge = { stroke: "transparent", spanGaps: true, points: { show: false } };
          series.push(edge, { ...edge });
          bands.push({ series: [at + 2, at + 1], fill: faint(name) });
          first[first.length - 1].push(at + 1, at + 2);
        }
      }
    });
    const fromZero = chart.stacked || (chart.over === "time" && ["ratio", "bytes", "B/s", "W"].includes(chart.unit));
    const log = view.log && !chart.unit && !fromZero && chart.lines.every((line) => Math.min(...line.means) > 0 && !(line.lows && Math.min(...line.lows) <= 0));
    const size = () => ({ width: Math.max(240, place.clientWidth), height: 240 });
    let plot = null;
    place.append(picture);
    const legend = key(chart, place, () => plot, (i) => first[i]);
    place.append(words);
    const options = {
      ...size(), series, bands, axes: axes(chart.unit, timed), plugins: [marks(() => chart, words), { hooks: { setCursor: legend.at_cursor } }],
      scales: { x: { time: false }, y: log ? { distr: 3 } : fromZero ? { range: (_, low, high) => [0, high * 1.05 || 1] } : {} },
      cursor: { drag: { x: true, y: false }, sync: { key: over } },
      legend: { show: false },
    };
    const rows_of = () => (chart.stacked ? stacked(chart) : joined(chart));
    plot = new uPlot(options, rows_of(), picture);
    // Show what has come since, and stay where somebody has zoomed in.
    const go_on = (fresh) => {
      const { min, max } = plot.scales.x;
      const zoomed = min > plot.data[0][0] || max < plot.data[0].at(-1);
      chart = fresh;
      picture.setAttribute("aria-label", chart.words);
      legend.at_rest(chart);
      plot.setData(rows_of(), !zoomed);
    };
    return { place, shape: shape(chart), resize: () => plot.setSize(size()), go_on };
  }
  // Two charts of one shape differ in their values alone.
  const shape = (chart) => JSON.stringify([view, chart.unit, chart.stacked, chart.over, chart.lines.map((line) => [line.name, line.color, line.dash, Boolean(line.lows), line.steps.length < 3])]);

  // What the reader chooses above the charts; the page may be filled again meanwhile.
  function look() {
    const form = document.getElementById("view");
    if (!form || form.oninput) return;
    const { over, smooth, log } = form.elements;
    if (over) over.value = view.over;
    smooth.value = view.smooth;
    log.checked = view.log;
    form.onsubmit = (event) => event.preventDefault();
    form.oninput = () => {
      Object.assign(view, { over: over ? over.value : "step", smooth: Number(smooth.value), log: log.checked });
      drawAll();
    };
  }

  let drawn = [];
  function drawAll() {
    drawn = data.charts.map((chart, i) => {
      const place = document.getElementById("chart-" + i), before = drawn[i];
      if (!before || before.place !== place || before.shape !== shape(chart)) return draw(chart, place);
      before.go_on(chart);
      return before;
    });
    look();
    root.dataset.drawn = data.charts.length;
  }
  globalThis.drawReport = (fresh) => { data = fresh; drawAll(); };
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawn = []; drawAll(); });
  let waiting = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => drawn.forEach((each) => each.resize()));
  });
})();

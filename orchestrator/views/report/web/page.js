// Draws the charts and the maps of ranks from the JSON in the page, and again from what drawReport()
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
  function show(value, unit) {
    if (value == null) return "-";
    if (unit === "ratio") return +(value * 100).toPrecision(3) + " %";
    if (!unit && Math.abs(value) >= 1e12) return value.toExponential(2);
    for (const [size, name] of UNITS[unit] || []) {
      if (Math.abs(value) >= size) return +(value / size).toPrecision(3) + name;
    }
    const small = value !== 0 && Math.abs(value) < 1e-3;
    const plain = small ? value.toExponential(2) : String(+value.toPrecision(4));
    return plain + (unit === "bytes" ? " B" : unit && " " + unit);
  }

  // A time since the start of the job.
  function clock(seconds) {
    if (seconds == null) return "-";
    const two = (number) => String(Math.floor(number)).padStart(2, "0");
    const [days, rest] = [Math.floor(seconds / 86400), seconds % 86400];
    const hours = days || rest >= 3600 ? Math.floor(rest / 3600) + ":" : "";
    return (days ? days + " d " : "") + hours + two((rest % 3600) / 60) + ":" + two(rest % 60);
  }

  // Put several lines, each with steps of its own, over one axis.
  function joined(chart) {
    return uPlot.join(chart.lines.map((line) => {
      const columns = [line.steps, line.means];
      if (line.lows) columns.push(line.lows, line.highs);
      return columns;
    }));
  }

  function stacked(lines) {
    const sums = lines[0].means.map(() => 0);
    return [lines[0].steps, ...lines.map((line) => line.means.map((value, i) => (sums[i] += value ?? 0)))];
  }

  const STEPS = [1, 10, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15].flatMap((power) => [power, 2 * power, 5 * power]);
  const SPLITS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  function axes(unit, timed) {
    const look = { stroke: color("soft"), grid: { stroke: color("rule"), width: 1 }, ticks: { stroke: color("rule") } };
    return [
      timed
        ? { ...look, incrs: SPLITS, space: 70, values: (_, ticks) => ticks.map(clock) }
        : { ...look, incrs: STEPS, values: (_, ticks) => ticks.map((tick) => show(tick, "")) },
      { ...look, size: unit === "B/s" ? 84 : 70, values: (_, ticks) => ticks.map((tick) => show(tick, unit)) },
    ];
  }

  // Small marks below the curve where something happened.
  function marks(known) {
    return {
      hooks: {
        draw: (plot) => {
          const { left, top, width, height } = plot.bbox;
          plot.ctx.save();
          for (const moment of known()) {
            const x = plot.valToPos(moment.step, "x", true);
            if (x < left || x > left + width) continue;
            plot.ctx.fillStyle = color(moment.bad ? "bad" : "soft");
            plot.ctx.fillRect(x - 1, top + height - 8, 2, 8);
          }
          plot.ctx.restore();
        },
      },
    };
  }

  function draw(chart, place) {
    place.replaceChildren();
    place.setAttribute("aria-label", chart.words);
    const timed = chart.over === "time";
    const series = [timed ? { label: "time", value: (_, at) => clock(at) } : { label: "step" }];
    const bands = [];
    const value = (_, number) => show(number, chart.unit);
    if (chart.stacked) {
      chart.lines.forEach((line, i) => {
        const name = "line-" + (i % 8);
        const own = (plot, number, s, at) => show(at == null ? null : chart.lines[i].means[at], chart.unit);  // not the sum
        series.push({ label: line.name, stroke: color(name), fill: faint(name), value: own, points: { show: false } });
        if (i) bands.push({ series: [i + 1, i] });
      });
    } else {
      chart.lines.forEach((line, i) => {
        const name = "line-" + (i % 8);
        const few = line.steps.length < 3;
        series.push({ label: line.name, stroke: color(name), width: 1.5, spanGaps: true, value, points: { show: few } });
        if (line.lows) {
          const at = series.length;
          const edge = { stroke: "transparent", spanGaps: true, points: { show: false }, value };
          series.push({ ...edge, label: "least" }, { ...edge, label: "most" });
          bands.push({ series: [at + 1, at], fill: faint(name) });
        }
      });
    }
    const fromZero = chart.stacked || (timed && ["ratio", "bytes", "B/s", "W"].includes(chart.unit));
    const size = () => ({ width: Math.max(240, place.clientWidth), height: 240 });
    const options = {
      ...size(), series, bands, axes: axes(chart.unit, timed), plugins: [marks(() => chart.moments)],
      scales: { x: { time: false }, y: fromZero ? { range: (_, low, high) => [0, high * 1.05 || 1] } : {} },
      cursor: { drag: { x: true, y: false } },
      legend: { show: true },
    };
    const rows_of = () => (chart.stacked ? stacked(chart.lines) : joined(chart));
    const plot = new uPlot(options, rows_of(), place);
    // The edges of a range need no line of their own in the legend.
    let at = 1;
    const rows = place.querySelectorAll(".u-legend .u-series");
    for (const line of chart.stacked ? [] : chart.lines) {
      at += 1;
      if (line.lows) {
        rows[at].hidden = rows[at + 1].hidden = true;
        rows[at].style.display = rows[at + 1].style.display = "none";
        at += 2;
      }
    }
    // Show what has come since, and stay where somebody has zoomed in.
    const go_on = (fresh) => {
      const { min, max } = plot.scales.x;
      const zoomed = min > plot.data[0][0] || max < plot.data[0].at(-1);
      chart = fresh;
      place.setAttribute("aria-label", chart.words);
      plot.setData(rows_of(), !zoomed);
    };
    return { place, shape: shape(chart), resize: () => plot.setSize(size()), go_on };
  }
  // Two charts of one shape differ in their values alone.
  const shape = (chart) => JSON.stringify([chart.unit, chart.stacked, chart.over, chart.lines.map((line) => [line.name, Boolean(line.lows), line.steps.length < 3])]);

  // A row for each rank; the color is the distance from the median of all ranks at that time, in
  // parts of a step (or of that median).
  function heat(distance) {
    if (distance == null) return "transparent";
    const strength = Math.min(1, Math.abs(distance) / 0.5);
    const hue = distance >= 0 ? 14 : 212;
    return `hsl(${hue} ${Math.round(20 + 70 * strength)}% 55% / ${0.12 + 0.88 * strength})`;
  }
  const median = (values) => {
    const known = values.filter((value) => value != null).sort((a, b) => a - b);
    return known.length ? known[(known.length - 1) >> 1] : null;
  };
  function drawMap(map, canvas, words) {
    const [columns, rows] = [map.steps.length, map.ranks.length];
    const high = Math.max(3, Math.min(22, Math.floor(320 / rows)));
    const wide = Math.max(1, Math.floor(1440 / columns));
    canvas.width = columns * wide;
    canvas.height = rows * high;
    canvas.style.height = rows * high + "px";
    const context = canvas.getContext("2d");
    const middles = map.steps.map((_, column) => median(map.rows.map((row) => row[column])));
    map.rows.forEach((row, y) => row.forEach((value, x) => {
      const scale = map.scale || middles[x];
      context.fillStyle = heat(value == null || !scale ? null : (value - middles[x]) / scale);
      context.fillRect(x * wide, y * high, wide, high - (high > 6 ? 1 : 0));
    }));
    canvas.onmousemove = (event) => {
      const x = Math.min(columns - 1, Math.floor((event.offsetX / canvas.clientWidth) * columns));
      const y = Math.min(rows - 1, Math.floor((event.offsetY / canvas.clientHeight) * rows));
      const value = map.rows[y][x];
      const ratio = value != null && middles[x] ? `, ${(value / middles[x]).toFixed(2)} of the median` : "";
      const when = map.whose === "node" ? clock(map.steps[x]) : `step ${map.steps[x]}`;
      words.textContent = `${map.whose} ${map.ranks[y]}, ${when}: ${show(value, map.unit)}${ratio}`;
    };
    canvas.onmouseleave = () => { words.textContent = map.summary; };
    canvas.setAttribute("aria-label", map.summary);
    if (words.textContent !== map.summary) words.textContent = map.summary;
  }

  let drawn = [];
  function drawAll() {
    drawn = data.charts.map((chart, i) => {
      const place = document.getElementById("chart-" + i), before = drawn[i];
      if (!before || before.place !== place || before.shape !== shape(chart)) return draw(chart, place);
      before.go_on(chart);
      return before;
    });
    data.maps.forEach((maps, i) => {
      const select = document.getElementById("which-" + i);
      const again = () => drawMap(maps[select.selectedIndex], document.getElementById("map-" + i), document.getElementById("words-" + i));
      select.onchange = again;
      again();
    });
    root.dataset.drawn = data.charts.length + data.maps.length;
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

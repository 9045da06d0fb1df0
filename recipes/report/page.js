"use strict";
// Draws the curves of the page from the JSON that it holds.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const controls = document.getElementById("controls");
  const live = document.getElementById("live");
  const touch = matchMedia("(pointer: coarse)").matches;
  const narrow = matchMedia("(max-width: 40rem)");
  const dashes = ["solid", "6px,3px", "2px,3px", "7px,3px,2px,3px", "12px,4px", "12px,3px,2px,3px"];
  const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "pentagon", "star"];
  const colors = 7;
  const charts = data.charts.map((chart, i) => ({ ...chart, element: place(`chart-${i}`) }));
  const stack = data.stack && { ...data.stack, element: place("stack") };
  const ratios = data.ratios && { ...data.ratios, element: place("ratios") };
  const further = [stack, ratios].filter((one) => one);
  const config = {
    responsive: true, displaylogo: false, doubleClick: false,
    displayModeBar: touch ? false : "hover", showTips: false,
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"]],
  };
  let range = null;  // of the common axis while zoomed
  let zooming = false;

  function place(id) { return document.getElementById(id); }
  function theme(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }
  // Plotly reads names as a kind of HTML.
  function plain(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }
  function axis() { return controls.elements.axis.value; }
  function isShown(series) {
    return controls.querySelector(`input[name=series][value="${series}"]`).checked;
  }
  function label() {
    return axis() === "seconds" ? "seconds of training" : data.axes[axis()];
  }

  function whole() {
    const ends = data.places.map((place) => (place[axis()] || [0]).at(-1));
    return [0, ends.reduce((a, b) => Math.max(a, b), Number.MIN_VALUE) * 1.01];
  }

  function layout(extra) {
    const line = { gridcolor: theme("grid"), linecolor: theme("rule"), zerolinecolor: theme("rule") };
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: theme("quiet") },
      paper_bgcolor: theme("paper"), plot_bgcolor: theme("paper"), showlegend: false,
      margin: { l: 52, r: 12, t: 8, b: 40 }, dragmode: touch ? false : "zoom",
      hoverlabel: {
        bgcolor: theme("paper"), bordercolor: theme("rule"),
        font: { color: theme("ink"), size: 12 }, align: "left", namelength: 40,
      },
      xaxis: {
        ...line, title: { text: label(), standoff: 6 }, showgrid: false, showline: true,
        ticks: "outside", ticklen: 4, tickcolor: theme("rule"), zeroline: false,
        range: range || whole(),
      },
      yaxis: { ...line, automargin: true, zeroline: false, nticks: 6, fixedrange: touch },
      ...extra,
    };
  }

  function traces(chart) {
    const few = chart.curves.length <= 4;
    return chart.curves.map((curve) => {
      const color = theme(`series-${curve.series % colors}`);
      const last = curve.values.findLastIndex((value) => value !== null);
      const marks = few && curve.values.length <= 60;
      const size = curve.values.map((_, i) => (curve.diverged && i === last ? 10 : marks ? 5 : 0));
      const symbol = symbols[curve.series % symbols.length];
      return {
        type: "scatter", name: plain(curve.name), visible: isShown(curve.series),
        mode: marks || curve.diverged ? "lines+markers" : "lines",
        x: data.places[curve.place][axis()] || [], y: curve.values,
        cliponaxis: false,
        line: {
          color, width: chart.curves.length > 12 ? 1.2 : 1.7,
          dash: dashes[curve.series % dashes.length],
        },
        marker: {
          color, size, opacity: 1, line: { width: 0 },
          symbol: curve.values.map((_, i) => (curve.diverged && i === last ? "x" : symbol)),
        },
        hovertemplate: `%{y:.5~g} ${chart.unit}` +
          (few ? "" : `<br>%{x:,.4~g} ${label()}`),
      };
    });
  }

  // The ticks of a logarithmic axis: powers of ten, or 1, 2 and 5 times each where they are few.
  function logTicks(chart) {
    const shown = chart.curves.filter((curve) => isShown(curve.series));
    const logs = shown.flatMap((curve) => curve.values.filter((v) => v > 0).map(Math.log10));
    const low = Math.floor(logs.reduce((a, b) => Math.min(a, b), Infinity));
    const high = Math.ceil(logs.reduce((a, b) => Math.max(a, b), -Infinity));
    if (high - low > 4) return { dtick: Math.ceil((high - low) / 6) };
    const powers = Array.from({ length: Math.max(0, high - low + 1) }, (_, i) => low + i);
    const tickvals = powers.flatMap((p) => [1, 2, 5].map((n) => Number(`${n}e${p}`)));
    return { tickmode: "array", tickvals, ticktext: tickvals.map(String) };
  }

  function drawChart(chart) {
    const log = chart.may_be_log && controls.elements.log.checked;
    const cut = chart.top !== null && !log ? { range: [0, chart.top], autorange: false } : {};
    const base = layout({ hovermode: chart.curves.length <= 4 ? "x unified" : "closest" });
    const ticks = log ? logTicks(chart) : {};
    base.yaxis = { ...base.yaxis, type: log ? "log" : "linear", ...cut, ...ticks };
    if (!log && chart.top === null) base.yaxis.rangemode = "tozero";
    return Plotly.react(chart.element, traces(chart), base, config);
  }

  // The steps of each column of a picture.
  function spans(edges) {
    return edges.step.slice(1).map((to, j) => `steps ${edges.step[j] + 1} to ${to}`);
  }

  function toldColumn(j) {
    const values = stack.names.map((_, i) => stack.percent[i][j]);
    if (values[0] === null) return "not recorded";
    return stack.names.map((name, i) => `${name} ${values[i].toFixed(1)} %`).join("<br>");
  }

  function drawStack() {
    const places = data.places[stack.place];
    const edges = places[axis()] || places.step;
    const width = edges.slice(1).map((to, j) => to - edges[j]);
    const x = width.map((size, j) => edges[j] + size / 2);
    const told = spans(places).map((steps, j) => `${steps}<br>${toldColumn(j)}`);
    // Bars that Plotly stacks itself get ticks at their centres.
    const below = stack.names.map((_, i) => width.map((_, j) =>
      stack.percent.slice(0, i).reduce((sum, row) => sum + row[j], 0)));
    const traces = stack.names.map((name, i) => ({
      type: "bar", name, x, width, y: stack.percent[i], base: below[i], customdata: told,
      marker: { color: theme(`part-${stack.colors[i]}`), line: { width: 0 } },
      hovertemplate: "%{customdata}<extra></extra>",
    }));
    const base = layout({ hovermode: "closest", barmode: "overlay", bargap: 0 });
    base.margin.t = 26;  // for the buttons
    base.yaxis = { ...base.yaxis, range: [0, 100], fixedrange: true };
    return Plotly.react(stack.element, traces, base, config);
  }

  function drawRatios() {
    const logs = ratios.median.map((row) => row.map((v) => (v > 0 ? Math.log10(v) : null)));
    const short = ratios.layers.map((name) => plain(name.replace(/\.weight$/, "")));
    const all = logs.flat().filter((v) => v !== null);
    // There may be more values than a function takes as arguments.
    const low = Math.floor(all.reduce((a, b) => Math.min(a, b), Infinity));
    const high = Math.ceil(all.reduce((a, b) => Math.max(a, b), -Infinity));
    const powers = Array.from({ length: high - low + 1 }, (_, i) => low + i);
    const told = ratios.median.map((row, i) => row.map((v, j) =>
      v === null ? "none" : `${v} (${ratios.least[i][j]} to ${ratios.greatest[i][j]})`));
    const edges = data.places[ratios.place];
    const trace = {
      type: "heatmap", x: edges[axis()] || edges.step, y: short, z: logs, colorscale: "Cividis",
      zmin: low, zmax: high, text: told, customdata: short.map(() => spans(edges)), hoverongaps: false,
      hovertemplate: "%{y}<br>%{customdata}<br>%{text}<extra></extra>",
      colorbar: {
        orientation: "h", thickness: 8, len: narrow.matches ? 1 : 0.4, x: 1, xanchor: "right",
        y: 1, yanchor: "bottom", ypad: 4, outlinewidth: 0, tickvals: powers,
        ticktext: powers.map((p) => (Math.abs(p) < 4 ? String(Number(`1e${p}`)) : `1e${p}`)),
      },
    };
    const row = 15;
    ratios.element.style.height = `${Math.max(160, short.length * row + 100)}px`;
    const base = layout({ hovermode: "closest" });
    base.margin = { ...base.margin, t: 40, b: 48 };
    base.xaxis.title.standoff = 12;
    base.yaxis = {
      ...base.yaxis, autorange: "reversed", type: "category", fixedrange: true, showgrid: false,
      nticks: 0, tickmode: "linear", tickfont: { size: narrow.matches ? 9 : 11 },
    };
    return Plotly.react(ratios.element, [trace], base, config);
  }

  function draw() {
    return Promise.all([
      ...charts.map(drawChart), ...(stack ? [drawStack()] : []), ...(ratios ? [drawRatios()] : []),
    ]);
  }

  // A zoom of one chart along its axis is one of all; a double click ends it.
  function follow(element) {
    element.on("plotly_relayout", (change) => {
      if (zooming || change["xaxis.range[0]"] === undefined) return;
      zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]], element);
    });
    element.on("plotly_doubleclick", () => {
      range = null;
      draw();
    });
  }
  function zoom(to, from) {
    range = to;
    zooming = true;
    const others = [...charts, ...further].filter((c) => c.element !== from);
    Promise.all(others.map((c) => Plotly.relayout(c.element, { "xaxis.range": [...to] })))
      .finally(() => { zooming = false; });
  }

  // The arrow keys move among the points of a chart, and the point is told as text.
  function listen(element, move) {
    const keys = {
      ArrowRight: [1, 0], ArrowLeft: [-1, 0], Home: [-1e9, 0], End: [1e9, 0],
      ArrowDown: [0, 1], ArrowUp: [0, -1],
    };
    const at = [-1, 0];
    element.addEventListener("keydown", (event) => {
      if (!(event.key in keys)) return;
      event.preventDefault();
      live.textContent = move(at, ...keys[event.key]);
    });
    element.addEventListener("blur", () => Plotly.Fx.unhover(element));
  }
  function within(value, count) { return Math.max(0, Math.min(count - 1, value)); }

  function alongCurve(chart) {
    return (at, right, down) => {
      const shown = chart.curves.map((_, i) => i).filter((i) => isShown(chart.curves[i].series));
      if (!shown.length) return "";
      at[1] = within(at[1] + down, shown.length);
      const curve = chart.curves[shown[at[1]]];
      const xs = data.places[curve.place][axis()] || [];
      at[0] = within(at[0] + right, xs.length);
      Plotly.Fx.hover(chart.element, [{ curveNumber: shown[at[1]], pointNumber: at[0] }]);
      const value = curve.values[at[0]];
      return `${chart.title}, ${curve.name}, ${xs[at[0]]} ${label()}: ` +
        (value === null ? "not finite" : `${Number(value.toPrecision(5))} ${chart.unit}`);
    };
  }
  function alongStack(at, right) {
    at[0] = within(at[0] + right, stack.edges.length - 1);
    // Plotly finds no bar of a column without values.
    if (stack.percent[0][at[0]] === null) Plotly.Fx.unhover(stack.element);
    else Plotly.Fx.hover(stack.element, [{ curveNumber: 0, pointNumber: at[0] }]);
    return `${spans(data.places[stack.place])[at[0]]}: ` +
      toldColumn(at[0]).replaceAll("<br>", ", ");
  }
  function acrossLayers(at, right, down) {
    at[0] = within(at[0] + right, ratios.edges.length - 1);
    at[1] = within(at[1] + down, ratios.layers.length);
    const [column, row] = at;
    const edges = data.places[ratios.place][axis()] || ratios.edges;
    const xval = (edges[column] + edges[column + 1]) / 2;
    Plotly.Fx.hover(ratios.element, [{ curveNumber: 0, xval, yval: row }]);
    return `${ratios.layers[row]}, up to step ${ratios.edges[column + 1]}: trust ratio ` +
      `${ratios.median[row][column]}`;
  }

  controls.addEventListener("change", (event) => {
    if (event.target.name === "axis") range = null;
    draw();
  });
  controls.addEventListener("submit", (event) => event.preventDefault());
  for (const query of [matchMedia("(prefers-color-scheme: dark)"), narrow]) {
    query.addEventListener("change", draw);
  }
  draw().then(() => {
    for (const chart of charts) {
      follow(chart.element);
      listen(chart.element, alongCurve(chart));
    }
    if (stack) {
      follow(stack.element);
      listen(stack.element, alongStack);
    }
    if (ratios) {
      follow(ratios.element);
      listen(ratios.element, acrossLayers);
    }
    document.documentElement.dataset.drawn = "yes";
  });
})();

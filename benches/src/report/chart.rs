//! Pictures, as SVG.

use std::{error::Error, fmt, ops::Range};

use lockkit_conformance::measure::{Figure, Role, Row, Scenario};
use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::who;
use crate::results::Results;

const WIDTH: u32 = 860;
const BAR: u32 = 22;
/// The height above and below the bars: the axis with its numbers and what they are.
const MARGIN: u32 = 56;
const LABELS: i32 = 330;
/// With a second figure in each label.
const WIDER: u32 = 250;
const FONT: &str = "sans-serif";
/// Of text and axes. The page has it replaced by the colour of its own text.
pub(super) const INK: RGBColor = RGBColor(0x24, 0x29, 0x2f);
/// Behind it all, since the page that shows the picture may be dark. The lockkit page has its own instead.
pub(super) const PAPER: RGBColor = WHITE;
const GRID: RGBColor = RGBColor(0x9a, 0xa3, 0xad);

/// The picture failed, which a text in memory does not.
#[derive(Debug)]
pub(super) struct CannotDraw(String);

impl fmt::Display for CannotDraw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot draw: {}", self.0)
    }
}

impl Error for CannotDraw {}

impl<E: Error + Send + Sync> From<DrawingAreaErrorKind<E>> for CannotDraw {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

/// The colours of the backends, told apart by most eyes (after Okabe and Ito), on white and on black.
const COLOURS: [(&str, RGBColor); 10] = [
    ("memory", RGBColor(0x7a, 0x7a, 0x7a)),
    ("file", RGBColor(0xb5, 0x8a, 0x00)),
    ("redis", RGBColor(0xd5, 0x5e, 0x00)),
    ("redlock", RGBColor(0xcc, 0x79, 0xa7)),
    ("zookeeper", RGBColor(0x00, 0x9e, 0x73)),
    ("mariadb", RGBColor(0x00, 0x72, 0xb2)),
    ("mysql", RGBColor(0x56, 0xb4, 0xe9)),
    ("postgres", RGBColor(0x8f, 0x5b, 0xd6)),
    ("etcd", RGBColor(0x4b, 0x6b, 0x3c)),
    ("etcd3", RGBColor(0xa8, 0x4b, 0x5c)),
];

/// The colour of a backend's bars: lockkit's own in full, the others' paler. Each is that backend's alone, so that the
/// page can tell by it whose they are.
pub(super) fn colour(backend: &str, role: Role) -> RGBColor {
    let found = COLOURS.iter().find(|(name, _)| *name == backend);
    let RGBColor(r, g, b) = found.map_or(RGBColor(0x80, 0x40, 0x40), |(_, colour)| *colour);
    let paler = |channel: u8| {
        let weight = match role {
            Role::Ours => 0,
            Role::Peer => 5,
            Role::Floor => 7,
        };
        let mixed = (u16::from(channel) * (10 - weight) + 0xd8 * weight) / 10;
        u8::try_from(mixed).unwrap_or(u8::MAX)
    };
    RGBColor(paler(r), paler(g), paler(b))
}

/// A bar per contestant and figure, on logarithmic scales, with the middle half of its rounds.
pub(super) fn bars(results: &Results, scenario: Scenario, figures: &[Figure]) -> Result<String, CannotDraw> {
    let measured = |row: &&Row| figures.iter().any(|figure| row.value(*figure).is_some());
    let rows: Vec<&Row> = results.of(scenario).filter(measured).collect();
    let more = u32::try_from(figures.len().saturating_sub(1)).unwrap_or_default();
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX);
    let labels = LABELS + i32::try_from(more * WIDER / 3).unwrap_or_default();
    let size = (WIDTH + more * WIDER, MARGIN + BAR * count);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&PAPER)?;
        let mut panels = Vec::new();
        let mut rest = root.clone();
        for (index, figure) in figures.iter().enumerate() {
            let left = if index == 0 { labels } else { 24 };
            let others = i32::try_from(figures.len() - index).unwrap_or(1);
            let (width, _) = rest.dim_in_pixel();
            let width = i32::try_from(width).unwrap_or(i32::MAX);
            let (panel, after) = rest.split_horizontally(left + (width - left) / others);
            rest = after;
            let values = rows.iter().filter_map(|row| row.value(*figure));
            let range = decades(values);
            let mut chart = ChartBuilder::on(&panel)
                .margin_right(24)
                .set_label_area_size(LabelAreaPosition::Left, left)
                .set_label_area_size(LabelAreaPosition::Bottom, 44)
                .build_cartesian_2d(range.clone().log_scale(), f64::from(count)..0.0)?;
            chart
                .configure_mesh()
                .disable_y_mesh()
                .disable_y_axis()
                .x_labels(if more > 0 { 5 } else { 8 })
                .x_desc(axis(*figure))
                .x_label_formatter(&|value| mark(*figure, *value))
                .axis_style(GRID.mix(0.6))
                .bold_line_style(GRID.mix(0.5))
                .max_light_lines(0)
                .label_style((FONT, 12).into_font().color(&INK))
                .draw()?;
            panels.push((*figure, range, chart));
        }
        // After all axes, which belong to nobody.
        for (place, row) in (0_u32..).zip(&rows) {
            let top = f64::from(place);
            let (bar_top, bar_bottom, middle) = (top + 0.18, top + 0.82, top + 0.5);
            let shade = colour(&row.backend, row.role);
            for (figure, range, chart) in &mut panels {
                let Some(value) = row.value(*figure) else { continue };
                let value = value.max(range.start);
                chart.draw_series([Rectangle::new(
                    [(range.start, bar_top), (value, bar_bottom)],
                    shade.filled(),
                )])?;
                if let Some(spread) = row.spread(*figure) {
                    let ends = [value * (1.0 - spread).max(0.01), value * (1.0 + spread)];
                    let ends = ends.map(|end| (end.clamp(range.start, range.end), middle));
                    chart.draw_series([PathElement::new(ends, INK.stroke_width(1))])?;
                }
            }
            if let Some((_, range, chart)) = panels.first() {
                let (x, y) = chart.backend_coord(&(range.start, middle));
                let values = figures.iter().map(|figure| {
                    row.value(*figure)
                        .map_or_else(|| "–".to_owned(), |value| figure.show(value))
                });
                let values: Vec<_> = values.collect();
                let text = format!("{}: {}", who(row), values.join(", "));
                label(&root, (x - 8, y), HPos::Right, text, row.role)?;
            }
        }
        root.present()?;
    }
    Ok(svg)
}

/// A line per lockkit backend, both axes logarithmic.
pub(super) fn lines(results: &Results, points: &[(f64, Scenario)]) -> Result<String, CannotDraw> {
    let Some((_, first)) = points.first() else {
        return Ok(String::new());
    };
    let figure = first.figure();
    let mut curves: Vec<(&Row, Vec<(f64, f64)>)> = Vec::new();
    for row in results.of(*first).filter(|row| row.role == Role::Ours) {
        let of_it = points.iter().filter_map(|(at, scenario)| {
            let mut rows = results.of(*scenario);
            let same = rows.find(|it| it.backend == row.backend && it.contestant == row.contestant)?;
            Some((*at, same.value(figure)?))
        });
        curves.push((row, of_it.collect()));
    }
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, 380)).into_drawing_area();
        root.fill(&PAPER)?;
        let range = decades(
            curves
                .iter()
                .flat_map(|(_, points)| points)
                .map(|(_, value)| *value),
        );
        let last = points.iter().map(|(at, _)| *at).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(&root)
            .margin_top(12)
            .margin_right(210)
            .set_label_area_size(LabelAreaPosition::Left, 76)
            .set_label_area_size(LabelAreaPosition::Bottom, 44)
            .build_cartesian_2d((1.0..last).log_scale(), range.log_scale())?;
        chart
            .configure_mesh()
            .x_desc("tasks")
            .y_desc(axis(figure))
            .x_label_formatter(&|value| format!("{value:.0}"))
            .y_label_formatter(&|value| mark(figure, *value))
            .axis_style(GRID.mix(0.6))
            .bold_line_style(GRID.mix(0.5))
            .max_light_lines(0)
            .label_style((FONT, 12).into_font().color(&INK))
            .draw()?;
        let mut ends = Vec::new();
        for (row, points) in &curves {
            let shade = colour(&row.backend, row.role);
            chart.draw_series(LineSeries::new(points.iter().copied(), shade.stroke_width(2)))?;
            let dots = points.iter().map(|point| Circle::new(*point, 3, shade.filled()));
            chart.draw_series(dots)?;
            if let Some(end) = points.last() {
                ends.push((chart.backend_coord(end), *row));
            }
        }
        // From the top down, each below the one before.
        ends.sort_by_key(|(at, _)| at.1);
        let mut lowest = 0;
        for ((x, y), row) in ends {
            lowest = y.max(lowest + 16);
            label(&root, (x + 8, lowest), HPos::Left, who(row), row.role)?;
        }
        root.present()?;
    }
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn label(root: &Area<'_>, at: (i32, i32), side: HPos, text: String, role: Role) -> Result<(), CannotDraw> {
    let style = if role == Role::Ours {
        FontStyle::Bold
    } else {
        FontStyle::Normal
    };
    let style = FontDesc::new(FontFamily::SansSerif, 13.0, style)
        .color(&INK)
        .pos(Pos::new(side, VPos::Center));
    root.draw(&Text::new(text, at, style))?;
    Ok(())
}

/// A power of ten needs no more digits than that.
fn mark(figure: Figure, value: f64) -> String {
    let shown = figure.show(value);
    let (number, unit) = shown.split_once(' ').unwrap_or((&shown, ""));
    let number = match number.split_once('.') {
        Some((whole, rest)) if rest.bytes().all(|digit| digit == b'0') => whole,
        _ => number,
    };
    format!("{number} {unit}").trim_end().to_owned()
}

fn axis(figure: Figure) -> &'static str {
    match figure {
        Figure::P50 | Figure::P99 => "median time, less is better",
        Figure::Rate => "locks per second, more is better",
        Figure::Longest => "longest wait, less is better",
        Figure::ServerTime => "server's processor time per lock, less is better",
        Figure::ClientTime => "clients' processor time per lock, less is better",
        Figure::Processor => "% of a core, less is better",
        Figure::Recovery => "time until the next grant, less is better",
        other => other.title(),
    }
}

/// The powers of ten around the values.
fn decades(values: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let positive = values.filter(|value| *value > 0.0);
    let low = positive.clone().fold(f64::INFINITY, f64::min);
    let high = positive.fold(0.0, f64::max);
    if high <= 0.0 {
        return 0.1..1.0;
    }
    // A little below the lowest, which would have no bar otherwise.
    let start = 10_f64.powf((low * 0.8).log10().floor());
    let end = 10_f64.powf((high * 1.02).log10().ceil());
    start..end.max(start * 10.0)
}

//! The page: everything in one file, which asks the network for nothing.

use std::collections::BTreeSet;

use lockkit_conformance::measure::Role;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use plotters::style::RGBColor;

use super::{Ratios, Section, absence, cell, chart, document::times, figures};
use crate::results::Results;

/// Forbids the browser to fetch anything at all.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";

pub(super) fn render(results: &Results, sections: &[Section]) -> Result<String, chart::CannotDraw> {
    let mut seen = BTreeSet::new();
    let backends: Vec<&str> = results
        .rows
        .iter()
        .map(|row| row.backend.as_str())
        .filter(|backend| seen.insert(*backend))
        .collect();
    let pictures: Vec<String> = sections
        .iter()
        .map(|section| section.draw(results).map(|svg| for_the_page(&svg, &backends)))
        .collect::<Result<_, _>>()?;
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                title { "lockkit: what it costs" }
                style { (PreEscaped(include_str!("page.css"))) }
            }
            body {
                header {
                    h1 { "What it costs" }
                    p { (provenance(results)) }
                    fieldset id="filter" {
                        legend { "Show" }
                        @for backend in &backends {
                            label {
                                input type="checkbox" checked value=(backend);
                                span.swatch style={ "background:" (hex(chart::colour(backend, Role::Ours))) } {}
                                (backend)
                            }
                        }
                        button type="button" id="all" { "all" }
                    }
                }
                main {
                    @for (section, picture) in sections.iter().zip(&pictures) {
                        section id=(section.id) {
                            h2 { (section.title) }
                            p { (section.about.replace('`', "")) }
                            figure { (PreEscaped(picture)) }
                            (table(results, section))
                        }
                    }
                }
                script { (PreEscaped(include_str!("page.js"))) }
            }
        }
    };
    Ok(page.into_string())
}

fn provenance(results: &Results) -> Markup {
    let machine = &results.machine;
    html! {
        "Medians of rounds in which the contestants took turns; ± is how far the middle half of the rounds lies to either \
         side. Taken " (results.date) " in a " (if results.quick { "quick" } else { "full" }) " run of "
        (results.seconds) " s on " (machine.cores) " cores of " (machine.processor) ", " (machine.memory_gib)
        " GiB, " (machine.system) ": "
        @for (index, (name, version)) in results.versions.iter().enumerate() {
            @if index > 0 { ", " }
            (name) " " (version)
        }
        "."
        @for skipped in &results.skipped {
            " Without " (skipped.backend) ": " (skipped.why) "."
        }
    }
}

fn table(results: &Results, section: &Section) -> Markup {
    let results = &*section.of(results);
    html! {
        @for scenario in &section.scenarios {
            @let figures = figures(results, *scenario);
            div.scroll {
                table {
                    caption { (scenario.title()) }
                    thead {
                        tr {
                            th { "backend" }
                            th { "contestant" }
                            @for figure in &figures { th { (figure.title()) } }
                            th { "× by hand" }
                            th { "× best peer" }
                        }
                    }
                    tbody {
                        @for row in results.of(*scenario).filter(|row| shown(row)) {
                            tr data-backend=(row.backend) class=[(row.role == Role::Ours).then_some("ours")] {
                                td { (row.backend) }
                                td { (row.contestant) }
                                @if let Some(why) = absence(row) {
                                    td.why colspan=(figures.len() + 2) { (why) }
                                } @else {
                                    @for figure in &figures { td.figure { (cell(row, *figure)) } }
                                    @let ratios = (row.role == Role::Ours).then(|| Ratios::of(results, row));
                                    @for ratio in ratios.map_or([None, None], |it| [it.floor, it.peer]) {
                                        td.figure { (ratio.map_or_else(String::new, |(_, ratio)| times(ratio))) }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// A peer that takes no part is no news.
fn shown(row: &lockkit_conformance::measure::Row) -> bool {
    row.role == Role::Ours || absence(row).is_none()
}

fn hex(RGBColor(r, g, b): RGBColor) -> String {
    format!("#{r:02X}{g:02X}{b:02X}")
}

/// Text takes the colour of the page's, and whatever belongs to a backend says so: bars and lines are known by their
/// colour, labels by their first word, and the spread of a bar by following it.
fn for_the_page(svg: &str, backends: &[&str]) -> String {
    let paper = format!("fill=\"{}\"", hex(chart::PAPER));
    let ink = hex(chart::INK);
    let shades: Vec<(String, &str)> = backends
        .iter()
        .flat_map(|backend| {
            let roles = [Role::Ours, Role::Peer, Role::Floor];
            roles.map(|role| (format!("\"{}\"", hex(chart::colour(backend, role))), *backend))
        })
        .collect();
    let mut whose = None;
    let mut tagged = String::with_capacity(svg.len() * 2);
    for (index, element) in svg.split('<').enumerate() {
        if index > 0 {
            tagged.push('<');
        }
        let by_colour = shades.iter().find(|(shade, _)| element.contains(shade));
        let owner = if let Some((_, backend)) = by_colour {
            whose = Some(*backend);
            whose
        } else if element.starts_with("polyline ") {
            whose
        } else if element.starts_with("text ") {
            let words = element
                .split_once('>')
                .map_or("", |(_, words)| words.trim_start());
            let first = words.split_once(" · ").map_or("", |(first, _)| first);
            backends.iter().copied().find(|backend| *backend == first)
        } else {
            None
        };
        match (owner, element.split_once(' ')) {
            (Some(backend), Some((name, rest))) => {
                tagged.extend([name, " data-backend=\"", backend, "\" ", rest]);
            }
            _ => tagged.push_str(element),
        }
    }
    tagged
        .replace(&ink, "currentColor")
        .replace(&paper, "fill=\"none\"")
}

//! Lines between nodes of a picture.

use super::layout::Point;

/// A way from a node to another: straight, or bent around what stands between.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) from: Point,
    pub(super) bend: Point,
    pub(super) to: Point,
}

impl Way {
    /// A point of it, from 0 at its beginning to 1 at its end.
    pub(super) fn at(&self, along: f64) -> Point {
        let mix = |from: f64, bend: f64, to: f64| {
            (1.0 - along).powi(2) * from + 2.0 * along * (1.0 - along) * bend + along * along * to
        };
        (mix(self.from.0, self.bend.0, self.to.0), mix(self.from.1, self.bend.1, self.to.1))
    }

    /// Beside it, to the right of who goes along.
    pub(super) fn beside(&self, by: f64) -> Self {
        let (x, y) = (self.to.0 - self.from.0, self.to.1 - self.from.1);
        let length = x.hypot(y).max(1e-9);
        let (x, y) = (-y / length * by, x / length * by);
        let moved = |at: Point| (at.0 + x, at.1 + y);
        Self { from: moved(self.from), bend: moved(self.bend), to: moved(self.to) }
    }

    /// As SVG has it.
    pub(super) fn path(&self) -> String {
        let Self { from, bend, to } = self;
        format!("M{:.1} {:.1}Q{:.1} {:.1} {:.1} {:.1}", from.0, from.1, bend.0, bend.1, to.0, to.1)
    }
}

/// A head on a way, a bit past its middle.
pub(super) fn arrow(way: &Way) -> String {
    let (tip, tail) = (way.at(0.66), way.at(0.60));
    let (x, y) = (tip.0 - tail.0, tip.1 - tail.1);
    let length = x.hypot(y).max(1e-9);
    let (x, y) = (x / length, y / length);
    let corner = |along: f64, beside: f64| (tip.0 + along * x - beside * y, tip.1 + along * y + beside * x);
    let ((ax, ay), (bx, by), (cx, cy)) = (corner(6.0, 0.0), corner(-11.0, 11.0), corner(-11.0, -11.0));
    format!("M{ax:.1} {ay:.1}L{bx:.1} {by:.1}L{cx:.1} {cy:.1}Z")
}

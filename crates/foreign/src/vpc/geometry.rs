//! Cylinders, heads and sectors, as the specification derives them from a size.

/// A geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Geometry {
    pub cylinders: u16,
    pub heads: u8,
    /// Of a track.
    pub sectors: u8,
}

impl Geometry {
    /// What a geometry can tell at most; disks of more have it, and their size beside it.
    pub(super) const LARGEST: Geometry = Geometry {
        cylinders: 65535,
        heads: 16,
        sectors: 255,
    };

    /// All sectors.
    pub(super) fn total(self) -> u64 {
        u64::from(self.cylinders) * u64::from(self.heads) * u64::from(self.sectors)
    }

    /// That of a disk of so many sectors, which may have somewhat more than its geometry tells.
    pub(super) fn of(sectors: u64) -> Geometry {
        let sectors = sectors.min(Geometry::LARGEST.total());
        let (heads, per_track) = if sectors >= 65535 * 16 * 63 {
            (16, 255)
        } else {
            let tracks = sectors / 17;
            let heads = tracks.div_ceil(1024).max(4);
            if heads <= 16 && tracks < heads * 1024 {
                (heads, 17)
            } else if sectors / 31 < 16 * 1024 {
                (16, 31)
            } else {
                (16, 63)
            }
        };
        Geometry {
            cylinders: (sectors / per_track / heads) as u16,
            heads: heads as u8,
            sectors: per_track as u8,
        }
    }

    /// That of the smallest disk that has so many sectors at least and is all told by its geometry, or the
    /// largest.
    pub(super) fn at_least(sectors: u64) -> Geometry {
        let sectors = sectors.min(Geometry::LARGEST.total());
        let mut more = 0;
        loop {
            let geometry = match sectors {
                0 => Geometry::default(),
                _ => Geometry::of(sectors + more),
            };
            // A cylinder has less than 2^12 sectors, so this ends soon.
            if geometry.total() >= sectors {
                return geometry;
            }
            more += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometries_are_those_of_the_specification() {
        let geometry = |cylinders, heads, sectors| Geometry {
            cylinders,
            heads,
            sectors,
        };
        // As QEMU makes them.
        assert_eq!(Geometry::at_least(204_800), geometry(1004, 12, 17));
        assert_eq!(Geometry::at_least(0), Geometry::default());
        assert_eq!(Geometry::of(u64::MAX), Geometry::LARGEST);
        assert_eq!(Geometry::at_least(u64::MAX), Geometry::LARGEST);
        assert_eq!(Geometry::at_least(1).total(), 68);
        let mut sectors = 1;
        while sectors < Geometry::LARGEST.total() {
            let geometry = Geometry::at_least(sectors);
            assert!(geometry.total() >= sectors, "{sectors}");
            assert!(geometry.total() < sectors + 4096, "{sectors}");
            sectors = sectors * 9 / 8 + 1;
        }
    }
}

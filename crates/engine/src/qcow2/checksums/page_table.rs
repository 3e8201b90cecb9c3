//! [`PageTable`]: the pages in memory. Requests on all lanes look pages up, and hardly ever add one.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::page::Page;

/// Regions that lie beside each other are in different parts.
const PARTS: usize = 16;

/// A part of the table, in cache lines of its own: whoever looks a page up writes to its lock.
#[derive(Default)]
#[repr(align(128))]
struct Part(RwLock<HashMap<u64, Arc<Page>>>);

/// Pages by region.
#[derive(Default)]
pub(super) struct PageTable {
    parts: [Part; PARTS],
    len: AtomicUsize,
}

impl PageTable {
    fn part(&self, region: u64) -> &RwLock<HashMap<u64, Arc<Page>>> {
        &self.parts[region as usize % PARTS].0
    }

    /// The page of a region, which is made if it is not there.
    pub(super) fn get(&self, region: u64) -> Arc<Page> {
        let part = self.part(region);
        if let Some(page) = part.read().get(&region) {
            return page.clone();
        }
        let mut pages = part.write();
        let page = pages.entry(region).or_insert_with(|| {
            self.len.fetch_add(1, Ordering::Relaxed);
            Arc::new(Page::new(region))
        });
        page.clone()
    }

    /// How many there are, more or less.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Drops pages that `is_spare` says nobody needs, until there are `most`.
    pub(super) fn shrink_to(&self, most: usize, is_spare: impl Fn(&Arc<Page>) -> bool) {
        for part in &self.parts {
            part.0.write().retain(|_, page| {
                let goes = self.len() > most && is_spare(page);
                if goes {
                    self.len.fetch_sub(1, Ordering::Relaxed);
                }
                !goes
            });
        }
    }

    /// Those that are chosen.
    pub(super) fn choose(&self, choose: impl Fn(&Page) -> bool) -> Vec<Arc<Page>> {
        let mut chosen = Vec::new();
        for part in &self.parts {
            let pages = part.0.read();
            chosen.extend(pages.values().filter(|page| choose(page)).cloned());
        }
        chosen
    }

    /// The first of some regions that has a page in memory.
    pub(super) fn first_in(&self, regions: &Range<u64>) -> Option<u64> {
        let parts = self.parts.iter();
        let firsts = parts.filter_map(|part| {
            let pages = part.0.read();
            let inside = pages.keys().filter(|region| regions.contains(region));
            inside.min().copied()
        });
        firsts.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_pages_go_and_others_stay() {
        let table = PageTable::default();
        let kept: Vec<_> = (0..40).map(|region| table.get(region * 3)).collect();
        drop((0..100).map(|region| table.get(region)).collect::<Vec<_>>());
        assert!(Arc::ptr_eq(&kept[1], &table.get(3)));
        assert_eq!(table.len(), 106);
        assert_eq!(table.first_in(&(100..200)), Some(102));
        assert_eq!(table.first_in(&(118..200)), None);
        let is_spare = |page: &Arc<Page>| Arc::strong_count(page) == 1;
        table.shrink_to(60, is_spare);
        assert_eq!(table.len(), 60);
        table.shrink_to(0, is_spare);
        let mut left: Vec<_> = table
            .choose(|_| true)
            .iter()
            .map(|page| page.region)
            .collect();
        left.sort_unstable();
        assert_eq!(left, (0..40).map(|region| region * 3).collect::<Vec<_>>());
    }
}

//! Makes the machine that a scenario begins with.

use std::sync::Arc;

use flate2::write::DeflateEncoder;
use std::io::Write as _;

use crate::audit::Frozen;
use crate::bitmap;
use crate::disk::Mode;
use crate::failure::{Failure, FailureKind, guarded};
use crate::guest::{Guest, close, perform};
use crate::image_engine::{Files, ImageEngine};
use crate::layout::{
    AUTOCLEAR_OFFSET, CHECKSUMS, COMPRESSED, COPIED, FEATURES_OFFSET, Layout, Mapped, ZERO,
};
use crate::machine::Machine;
use crate::model::Model;
use crate::pattern::{self, Value, WriteId};
use crate::runtime::Runtime;
use crate::scenario::{Backing, DataFile, ImageOptions, Op, Place, Preparation, Scenario};
use crate::sparse_bytes::{SECTOR_BYTES, SparseBytes};
use crate::verify::inspect;

/// What a LUKS header takes at most, with what counts it.
const LUKS_BYTES: u64 = 1 << 20;

/// What a device holds where nothing was ever written.
pub(crate) const DEVICE_FILL: u8 = 0xe5;

/// Makes a scenario's image and brings it to where the scenario begins.
pub fn prepare(engine: &Arc<dyn ImageEngine>, scenario: &Scenario) -> Result<Machine, Failure> {
    guarded(|| {
        let options = &scenario.image;
        let mut model = Model::new(options.size_bytes);
        let backing = make_backing(engine, options, &mut model)?.map(Arc::new);
        let mut files = vec![blank(options, false)];
        if options.data_file != DataFile::Inside {
            files.push(blank(options, true));
        }
        for _ in files.len()..options.own_files() {
            files.push(SparseBytes::new());
        }
        let machine = Machine {
            files,
            backing,
            model,
            frozen: Arc::default(),
        };
        let mut machine = create(engine, options, machine)?;
        machine = bitmap::add(engine, options, machine)?;
        machine = apply_ops(engine, options, machine, &scenario.setup)?;
        for preparation in &scenario.preparations {
            let changed = apply(preparation, &mut machine);
            forget_checksums(&mut machine.files[0]);
            changed.map_err(|message| Failure::new(FailureKind::Setup, message))?;
        }
        if engine.is_qcow2() {
            let frozen = Frozen::of(&machine.files[0])
                .map_err(|message| Failure::new(FailureKind::Setup, message))?;
            machine.frozen = Arc::new(frozen);
        }
        bitmap::begin_scenario(options, &mut machine.model);
        let dirty = Layout::parse(&machine.files[0]).is_ok_and(|layout| layout.dirty);
        if !dirty {
            let plugged = machine.plug(options, Mode::Instant);
            let mut runtime = Runtime::new(plugged.disk.clone(), 0);
            inspect(
                engine,
                &machine.files[0],
                &machine.frozen,
                &plugged,
                &mut runtime,
            )
            .map_err(|failure| failure.when("before the scenario begins"))?;
        }
        Ok(machine)
    })
}

fn blank(options: &ImageOptions, data: bool) -> SparseBytes {
    if options.traits.growable {
        return SparseBytes::new();
    }
    if let Place::Fixed { len_bytes } = options.place {
        return SparseBytes::device(len_bytes, DEVICE_FILL);
    }
    let cluster = 1 << options.cluster_bits;
    let size = options.size_bytes.next_multiple_of(cluster);
    match options.data_file {
        // Such an image shows what the device held before.
        DataFile::ExternalRaw if data => SparseBytes::device(size, 0),
        _ if data => SparseBytes::device(size, DEVICE_FILL),
        _ => {
            let luks = if options.encrypted { LUKS_BYTES } else { 0 };
            SparseBytes::device(2 * size + 64 * cluster + (1 << 20) + luks, DEVICE_FILL)
        }
    }
}

fn create(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    mut machine: Machine,
) -> Result<Machine, Failure> {
    let plugged = machine.plug(options, Mode::Instant);
    let mut runtime = Runtime::new(plugged.disk.clone(), 0);
    let created = runtime.block_on(engine.create(plugged.files(), options))?;
    created.map_err(|error| Failure::error(FailureKind::Setup, "create", &error))?;
    machine.files = plugged.contents();
    Ok(machine)
}

/// Does requests one after the other on an image that cannot fail, and closes it.
fn apply_ops(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    mut machine: Machine,
    ops: &[Op],
) -> Result<Machine, Failure> {
    let plugged = machine.plug(options, Mode::Instant);
    let mut runtime = Runtime::new(plugged.disk.clone(), 0);
    let guest = Guest::new(engine, options, &plugged, machine.model.clone());
    let (inside, ops) = (guest.clone(), ops.to_vec());
    runtime.block_on(async move {
        let device = inside
            .plugged
            .open(&*inside.engine, &inside.options)
            .await?;
        for op in ops {
            perform(inside.clone(), device.clone(), op).await?;
        }
        close(&inside, &*device).await
    })??;
    runtime.finish_all();
    machine.files = plugged.contents();
    machine.model = guest.model.borrow().clone();
    machine.model.make_durable();
    Ok(machine)
}

fn make_backing(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    model: &mut Model,
) -> Result<Option<SparseBytes>, Failure> {
    match options.backing {
        Backing::None => Ok(None),
        Backing::Raw(size_bytes) => {
            let id = model.set_backing(size_bytes);
            let mut pages = SparseBytes::new();
            pages.write(0, &written(id, size_bytes));
            Ok(Some(pages))
        }
        Backing::Qcow2 {
            size_bytes,
            cluster_bits,
        } => {
            let id = model.set_backing(size_bytes);
            let below = ImageOptions::plain(size_bytes, cluster_bits);
            let machine = Machine {
                files: vec![SparseBytes::new()],
                backing: None,
                model: Model::new(size_bytes),
                frozen: Arc::default(),
            };
            let machine = create(engine, &below, machine)?;
            fill(engine, &below, machine, written(id, size_bytes)).map(Some)
        }
    }
}

fn fill(
    engine: &Arc<dyn ImageEngine>,
    options: &ImageOptions,
    machine: Machine,
    bytes: Vec<u8>,
) -> Result<SparseBytes, Failure> {
    let plugged = machine.plug(options, Mode::Instant);
    let mut runtime = Runtime::new(plugged.disk.clone(), 0);
    let (engine, options, inside) = (engine.clone(), options.clone(), plugged.clone());
    runtime.block_on(async move {
        let failed = |error| Failure::error(FailureKind::Setup, "fill the backing file", &error);
        let files: Files = inside.files();
        let device = engine.open(files, &options).await.map_err(failed)?;
        let buffer = vellum_io::Buffer::copy_of(&bytes);
        device
            .write(0, buffer, vellum::RequestFlags::default())
            .await
            .map_err(failed)?;
        device.close().await.map_err(failed)
    })??;
    runtime.finish_all();
    Ok(plugged.contents().swap_remove(0))
}

fn written(id: WriteId, len_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes as usize];
    pattern::fill(id, 0, &mut bytes);
    bytes
}

fn apply(preparation: &Preparation, machine: &mut Machine) -> Result<(), String> {
    let layout = Layout::parse(&machine.files[0])?;
    match *preparation {
        Preparation::Compress(count) => compress(layout, machine, count),
        Preparation::ZeroFlags(count) => set_zero_flags(&layout, machine, count),
        Preparation::Snapshot => {
            snapshot(layout, &mut machine.files[0]);
            machine.model.add_prepared_snapshot("1");
        }
        Preparation::FullTable(left) => lengthen(&layout, &mut machine.files[0], left),
        Preparation::Dirty(count) => leave_dirty(&layout, &mut machine.files[0], count),
    }
    Ok(())
}

/// As another program does that changes an image.
fn forget_checksums(pages: &mut SparseBytes) {
    if pages.be64(0) as u32 >= 3 {
        pages.put_be64(AUTOCLEAR_OFFSET, pages.be64(AUTOCLEAR_OFFSET) & !CHECKSUMS);
    }
}

/// All entries of the active L2 tables.
fn active(layout: &Layout, pages: &SparseBytes) -> Vec<Mapped> {
    let tables = layout.l1.iter();
    tables
        .flat_map(|(index, entry)| layout.mappings(pages, *index, *entry))
        .collect()
}

/// Compresses clusters that have no entry in an L2 table that exists.
fn compress(mut layout: Layout, machine: &mut Machine, count: u64) {
    let size = layout.cluster_bytes();
    let taken: Vec<u64> = active(&layout, &machine.files[0])
        .iter()
        .map(|mapped| mapped.guest)
        .collect();
    let mut free = Vec::new();
    for (index, table) in layout.l2_tables() {
        for slot in 0..layout.l2_entries() {
            let guest = index * layout.l2_entries() + slot;
            if (guest + 1) * size <= layout.size_bytes && !taken.contains(&guest) {
                free.push((guest, table + slot * layout.entry_bytes()));
            }
        }
    }
    let pages = &mut machine.files[0];
    let Some(mut at) = (count > 0).then(|| layout.allocate(pages, count)) else {
        return;
    };
    let first = at / size;
    let mut references = vec![0u64; count as usize];
    let step = (free.len() as u64 / count).max(1) as usize;
    for (guest, entry_offset) in free.into_iter().step_by(step).take(count as usize) {
        let id = machine.model.new_write();
        let mut plain = vec![0; size as usize];
        pattern::fill(id, guest * size, &mut plain);
        let Some(packed) = deflate(&plain, size) else {
            continue;
        };
        let end = at + packed.len() as u64;
        let sectors = (end - 1) / 512 - at / 512;
        pages.write(at, &packed);
        let bits = 62 - (layout.cluster_bits - 8);
        pages.put_be64(entry_offset, COMPRESSED | sectors << bits | at);
        if layout.extended_l2 {
            pages.put_be64(entry_offset + 8, 0);
        }
        for cluster in at / size..=(end - 1) / size {
            references[(cluster - first) as usize] += 1;
        }
        let per_cluster = size / SECTOR_BYTES;
        for sector in guest * per_cluster..(guest + 1) * per_cluster {
            machine.model.set_durable(sector, Value::Written(id));
        }
        at = end;
    }
    for (index, references) in references.into_iter().enumerate() {
        layout.set_refcount(pages, first + index as u64, references);
    }
}

/// Raw deflate, if it makes the bytes shorter.
fn deflate(plain: &[u8], limit: u64) -> Option<Vec<u8>> {
    let mut encoder = DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(plain).ok()?;
    encoder
        .finish()
        .ok()
        .filter(|packed| (packed.len() as u64) < limit)
}

fn set_zero_flags(layout: &Layout, machine: &mut Machine, count: u64) {
    if layout.version < 3 {
        return;
    }
    let per_cluster = layout.cluster_bytes() / SECTOR_BYTES;
    let entries = active(layout, &machine.files[0]);
    for mapped in entries
        .iter()
        .filter(|mapped| mapped.host().is_some())
        .take(count as usize)
    {
        let pages = &mut machine.files[0];
        if layout.extended_l2 {
            pages.put_be64(mapped.entry_offset + 8, 0xffff_ffff << 32);
        } else {
            pages.put_be64(mapped.entry_offset, mapped.entry | ZERO);
        }
        let first = mapped.guest * per_cluster;
        let end = (first + per_cluster).min(layout.size_bytes / SECTOR_BYTES);
        (first..end).for_each(|sector| machine.model.set_durable(sector, Value::Zero));
    }
}

fn leave_dirty(layout: &Layout, pages: &mut SparseBytes, count: u64) {
    let hosts: Vec<u64> = active(layout, pages)
        .iter()
        .filter_map(Mapped::host)
        .collect();
    for host in hosts.into_iter().take(count as usize) {
        layout.set_refcount(pages, host >> layout.cluster_bits, 0);
    }
    pages.put_be64(FEATURES_OFFSET, pages.be64(FEATURES_OFFSET) | 1);
}

/// Makes the file end `left` clusters before what the refcount table can count.
fn lengthen(layout: &Layout, pages: &mut SparseBytes, left: u64) {
    let size = layout.cluster_bytes();
    let clusters = layout.table_clusters * size / 8 * layout.block_entries();
    let len_bytes = clusters.saturating_sub(left) * size;
    pages.set_len(len_bytes.max(pages.len_bytes()));
}

/// Shares every cluster with a new snapshot.
fn snapshot(mut layout: Layout, pages: &mut SparseBytes) {
    let size = layout.cluster_bytes();
    for (l1_index, l1_entry) in layout.l1.clone() {
        let table = l1_entry & !COPIED;
        add_reference(&layout, pages, table, size);
        pages.put_be64(layout.l1_offset + l1_index * 8, table);
        for mapped in layout.mappings(pages, l1_index, l1_entry) {
            if let Some((offset, len)) = mapped.compressed(layout.cluster_bits) {
                add_reference(&layout, pages, offset, len);
            } else if let Some(host) = mapped.host() {
                add_reference(&layout, pages, host, size);
                pages.put_be64(mapped.entry_offset, mapped.entry & !COPIED);
            }
        }
    }
    let l1_len = layout.l1_entries * 8;
    let l1_copy = layout.allocate(pages, l1_len.div_ceil(size).max(1));
    pages.write(l1_copy, &pages.bytes(layout.l1_offset, l1_len));
    let table = layout.allocate(pages, 1);
    pages.write(table, &snapshot_entry(l1_copy, &layout));
    let snapshots_word = pages.be64(56) & !0xffff_ffff;
    pages.put_be64(56, snapshots_word | 1);
    pages.put_be64(64, table);
}

fn add_reference(layout: &Layout, pages: &mut SparseBytes, offset: u64, len: u64) {
    let size = layout.cluster_bytes();
    for cluster in offset / size..=(offset + len - 1) / size {
        let refcount = layout.refcount(pages, cluster);
        layout.set_refcount(pages, cluster, refcount + 1);
    }
}

fn snapshot_entry(l1_offset: u64, layout: &Layout) -> Vec<u8> {
    let mut entry = Vec::new();
    entry.extend(l1_offset.to_be_bytes());
    entry.extend((layout.l1_entries as u32).to_be_bytes());
    entry.extend(1u16.to_be_bytes());
    entry.extend(1u16.to_be_bytes());
    entry.extend([0; 20]);
    entry.extend(24u32.to_be_bytes());
    entry.extend(0u64.to_be_bytes());
    entry.extend(layout.size_bytes.to_be_bytes());
    entry.extend(u64::MAX.to_be_bytes());
    entry.extend(b"1s");
    entry.resize(entry.len().next_multiple_of(8), 0);
    entry
}

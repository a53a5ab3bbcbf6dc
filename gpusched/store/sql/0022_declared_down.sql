-- Why a node was declared down: until now only the message of its drain told, `declared down: the fan broke`.
ALTER TABLE drainers ADD COLUMN down TEXT;
UPDATE drainers SET down = (
    SELECT replace(message, 'declared down: ', '') FROM drains
    WHERE drains.target = drainers.target AND (
        message GLOB 'declared down: *' OR message GLOB char(2) || '[?]' || char(31) || 'declared down: *'
    )
);
